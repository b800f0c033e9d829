// The decoder's parts as both sides see them (native_decoder.py mirrors these structs), and the calls that the kernels make on each other.
#pragma once
#include <cstdint>

struct Norm { const float *weight, *bias; };
struct Matrix { const void* panels; const float* bias; int64_t in, out; };  // bias may be null

struct Layer {
  Norm attention_norm, mlp_norm;
  const float *query_norm, *key_norm;  // null where the family has none
  Matrix qkv, out, gate, up, down;     // gate.panels is null where the MLP is plain
  void *keys, *values;                 // [blocks][kv_heads] panels
};

struct Model {
  int64_t width, heads, kv_heads, head_size, padded_head, intermediate, block_size, threads;
  int64_t layer_norm, bf16_weights;  // flags
  int64_t keeps;                     // flag: this rank's sums go on from the rows that went in; the others' begin at zero
  float norm_eps, scale;
  const float *cosines, *sines;  // [positions][head_size / 2]; null where positions are learned
  void (*sum)(float* rows, int64_t count);  // puts the sum over the ranks in their place; null for one rank
};

struct Rows {
  int64_t rows, slots_count, table_width;
  const int64_t *positions, *table, *tables, *slots, *slot_rows;
};

// Where tokens become hidden rows: columns of a tied head, or rows of a table of their own; learned positions are added where there are any.
// Only ids in [first, first + count) are here; other tokens' rows are zero.
struct Embedding { Matrix tied; const void *table, *positions; int64_t offset, first, count; };  // tied.panels or table is null

// What an exit adds to its rows before the shared norm: x + f(x / rms(x)), f linear (gate.panels null: up alone) or a gated MLP.
struct ExitNetwork { Matrix up, gate, down; };

// An exit: its network (linear.panels and the rest null where it has none), its head, and the ids that the head's columns stand for.
struct Exit {
  ExitNetwork network;
  Matrix head;
  const int64_t* ids;  // ascending; null where column v is id v
};

// What a run of guesses needs to know of each sequence, and where the guesses go. Arrays without a size have one entry a sequence.
struct Drafts {
  int64_t sequences, most;                            // `most`: columns of the outputs
  const int64_t *tokens, *positions, *table, *steps;  // the token to run first, its position, its line in the tables, how many to guess
  const float* temperatures;
  const int64_t* seeds;
  const int64_t* homes;  // [sequences, most + 1]: the lines of `held` where the rows go that guesses were made from, and the last guess's own
  float* held;
  float stop;  // a sequence guesses no further after a guess whose gap is smaller,
  const int64_t *ends, *ends_from;  // nor after one of its own ends: those from ends[ends_from[s]] to before ends[ends_from[s + 1]]
  int64_t *guesses, *seconds;  // [sequences, most]
  float* gaps;                 // [sequences, most]
  int64_t* made;               // guesses of each sequence
};

// Who chooses how: one entry a row.
struct Law { const float* temperatures; const int64_t *seeds, *positions; };

// The choices [rows], and where not null the runners-up and by how much their scores fall short, and both scores.
struct Chosen { int64_t *ids, *seconds; float *gaps, *scores, *second_scores; };

extern "C" {
void hispec_embed(const Model* m, const Embedding* embedding, int64_t rows, const int64_t* ids, const int64_t* positions, float* out);
void hispec_run_layers(const Model* m, const Layer* layers, int64_t count, const Rows* rows, float* hidden, float* scratch);
void hispec_run_exit(const Model* m, const Norm* norm, const Exit* exit, int64_t rows, const float* hidden, float* scratch, float* logits);
void hispec_choose(const float* logits, int64_t rows, int64_t vocabulary, const int64_t* ids, const Law* law, int64_t threads, const Chosen* chosen);
}
