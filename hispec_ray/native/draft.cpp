// A run of guesses at an exit: embed, the layers below, the exit's own layer and head, the choice, again and again, in one call for a batch;
// then the rows of the last guesses. The same numbers as the same passes one by one.
#include <algorithm>
#include <cstring>
#include <vector>

#include "model.h"

extern "C" {
// own: the exit's own layer; null where it has none.
// scratch: sequences * (width + row_floats + the exit's columns) floats, row_floats being what the layers and the exit want for a row.
void hispec_draft(const Model* m, const Embedding* embedding, const Layer* layers, int64_t count, const Layer* own, const Norm* norm, const Exit* exit,
                  const int64_t* tables, int64_t table_width, const Drafts* d, int64_t row_floats, float* scratch) {
  const int64_t n = d->sequences, columns = exit->head.out;
  float *hidden = scratch, *inner = hidden + n * m->width, *logits = inner + n * row_floats;
  std::vector<int64_t> open, tokens(size_t(n), 0), positions(size_t(n), 0), lines(size_t(n), 0), slots(size_t(n), 0), order(size_t(n), 0), seeds(size_t(n), 0),
      next(size_t(n), 0), ids(size_t(n), 0), seconds(size_t(n), 0);
  std::vector<float> temperatures(size_t(n), 0.0f), gaps(size_t(n), 0.0f);
  for (int64_t s = 0; s < n; ++s) {
    d->made[s] = 0;
    tokens[size_t(s)] = d->tokens[s];
    if (d->steps[s] > 0) open.push_back(s);
  }
  std::vector<int64_t> current = tokens, guessed = open;
  // Runs the next row of some sequences and leaves it at its home.
  const auto run = [&](const std::vector<int64_t>& sequences) {
    const int64_t rows = int64_t(sequences.size());
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t s = sequences[size_t(r)], position = d->positions[s] + d->made[s];
      tokens[size_t(r)] = current[size_t(s)];
      positions[size_t(r)] = position;
      next[size_t(r)] = position + 1;
      lines[size_t(r)] = d->table[s];
      slots[size_t(r)] = tables[d->table[s] * table_width + position / m->block_size] * m->block_size + position % m->block_size;
      order[size_t(r)] = r;
      seeds[size_t(r)] = d->seeds[s];
      temperatures[size_t(r)] = d->temperatures[s];
    }
    const Rows pass = {rows, rows, table_width, positions.data(), lines.data(), tables, slots.data(), order.data()};
    hispec_embed(m, embedding, rows, tokens.data(), positions.data(), hidden);
    hispec_run_layers(m, layers, count, &pass, hidden, inner);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t s = sequences[size_t(r)];
      std::memcpy(d->held + d->homes[s * (d->most + 1) + d->made[s]] * m->width, hidden + r * m->width, size_t(m->width) * 4);
    }
    if (own) hispec_run_layers(m, own, 1, &pass, hidden, inner);
  };
  while (!open.empty()) {
    const int64_t rows = int64_t(open.size());
    run(open);
    hispec_run_exit(m, norm, exit, rows, hidden, inner, logits);
    const Law law = {temperatures.data(), seeds.data(), next.data()};
    const Chosen chosen = {ids.data(), seconds.data(), gaps.data(), nullptr, nullptr};
    hispec_choose(logits, rows, columns, exit->ids, &law, m->threads, &chosen);
    std::vector<int64_t> still;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t s = open[size_t(r)], at = s * d->most + d->made[s];
      d->guesses[at] = current[size_t(s)] = ids[size_t(r)];
      d->seconds[at] = seconds[size_t(r)];
      d->gaps[at] = gaps[size_t(r)];
      const int64_t* past = d->ends + d->ends_from[s + 1];
      const bool ended = std::find(d->ends + d->ends_from[s], past, ids[size_t(r)]) != past;
      if (++d->made[s] < d->steps[s] && gaps[size_t(r)] >= d->stop && !ended) still.push_back(s);
    }
    open = still;
  }
  if (!guessed.empty()) run(guessed);
}
}
