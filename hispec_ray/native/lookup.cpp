// The lookup of hispec_ray.speculation.drafters, guess for guess: it says what is looked up, how confidence is counted, and why.
// Compiled without contraction: every operation is one IEEE rounding, as it is in Python.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {
constexpr int LENGTHS[] = {6, 4, 3, 2}, COUNT = 4, LONGEST = 6;
constexpr int RANKS = 3, FORTUNES = 4, OTHERS = RANKS, OWN = OTHERS * (COUNT + 1), KINDS = OWN * (COUNT + 1), MOST_NEW = 32;
constexpr double FORTUNE_STEP = 0.1, START = 0.4, WEIGHT = 20.0, MEMORY = 100.0;
constexpr int32_t NOBODY = -1;  // no token

struct Gram {
  int32_t tokens[LONGEST] = {-1, -1, -1, -1, -1, -1};  // the rest stays, so that lengths differ
  bool operator==(const Gram& other) const { return !std::memcmp(tokens, other.tokens, sizeof tokens); }
};

struct Hash {
  size_t operator()(const Gram& gram) const {
    uint64_t hash = 0;
    for (int32_t token : gram.tokens) {
      hash = (hash ^ uint32_t(token)) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    }
    return size_t(hash);
  }
};

using Follows = std::unordered_map<Gram, int32_t, Hash>;
using Pair = std::pair<int32_t, int32_t>;

// The last tokens of a text, at most LONGEST.
struct Tail {
  int32_t tokens[LONGEST];
  int size = 0;
  void add(int32_t token) {
    if (size == LONGEST) std::memmove(tokens, tokens + 1, sizeof tokens - sizeof tokens[0]), --size;
    tokens[size++] = token;
  }
  bool holds(int length) const { return length <= size; }
  Gram gram(int length) const {
    Gram gram;
    std::memcpy(gram.tokens, tokens + size - length, size_t(length) * sizeof tokens[0]);
    return gram;
  }
};

struct Phrases {
  Follows follows;
  std::unordered_map<int32_t, Pair> after;
};

struct Text {
  std::unordered_set<int32_t> ends;
  Follows follows;
  Tail tail;
  double foretold = 0.5;
  void note(int32_t token) {
    for (int length : LENGTHS)
      if (tail.holds(length)) follows[tail.gram(length)] = token;
    tail.add(token);
  }
};

struct Candidate { int32_t token; int kind; };

// The n-grams of all texts, of which the ones that were written longest ago go first.
class Others {
 public:
  void note(const Gram& gram, int32_t token) {
    auto found = at_.find(gram);
    if (found == at_.end()) {
      order_.emplace_back(gram, token);
      at_.emplace(gram, std::prev(order_.end()));
    } else {
      found->second->second = token;
      order_.splice(order_.end(), order_, found->second);
    }
  }
  int32_t of(const Gram& gram) const {
    auto found = at_.find(gram);
    return found == at_.end() ? NOBODY : found->second->second;
  }
  void shrink(size_t entries) {
    for (; at_.size() > entries; order_.pop_front()) at_.erase(order_.front().first);
  }

 private:
  std::list<std::pair<Gram, int32_t>> order_;
  std::unordered_map<Gram, std::list<std::pair<Gram, int32_t>>::iterator, Hash> at_;
};

struct Best {
  double share = -1.0, next_share = -1.0;
  int32_t token = NOBODY, next = NOBODY;
};

int fortune_of(double foretold) { return int(foretold * FORTUNES * 0.999); }

class Lookup {
 public:
  Lookup(const Phrases* phrases, size_t entries) : phrases_(phrases), entries_(entries) { std::fill_n(shares_, KINDS * (FORTUNES + 1), START); }

  std::unordered_map<int64_t, Text> texts;

  void take_up(Text& text, const int64_t* tokens, const int64_t* seconds, int64_t count) {
    int64_t late = std::max<int64_t>(0, count - MOST_NEW);
    for (int64_t i = 0; i < late; ++i) text.note(int32_t(tokens[i]));
    for (int64_t i = late; i < count; ++i) {
      int32_t token = int32_t(tokens[i]);
      if (text.tail.size) {
        find(text, text.tail);
        int32_t best = ranked(text.foretold).token;
        int fortune = fortune_of(text.foretold);
        for (const Candidate& candidate : candidates_) learn(candidate.kind, fortune, candidate.token == token);
        text.foretold += FORTUNE_STEP * ((best == token ? 1.0 : 0.0) - text.foretold);
        after_[text.tail.tokens[text.tail.size - 1]] = {token, int32_t(seconds[i])};
      }
      for (int length : LENGTHS)
        if (text.tail.holds(length)) others_.note(text.tail.gram(length), token);
      text.note(token);
    }
    others_.shrink(entries_);
  }

  int64_t propose(const Text& text, const int64_t* tentative, int64_t count, int64_t most, double least, double each, int64_t* tokens, int64_t* seconds,
                  double* chances) {
    Tail tail = text.tail;
    for (int64_t i = 0; i < count; ++i) tail.add(int32_t(tentative[i]));
    double foretold = text.foretold, chance = 1.0;
    int64_t made = 0;
    while (made < most) {
      find(text, tail);
      Best best = ranked(foretold);
      if (best.token == NOBODY || chance * best.share < least || best.share < each) break;
      seconds[made] = chance * best.next_share >= least ? best.next : NOBODY;
      chance *= best.share;
      tokens[made] = best.token;
      chances[made++] = chance;
      if (text.ends.count(best.token)) break;
      tail.add(best.token);
      foretold += FORTUNE_STEP * (1.0 - foretold);
    }
    return made;
  }

 private:
  // Puts what may follow the last tokens into candidates_, those with the longest n-grams of this text first.
  void find(const Text& text, const Tail& tail) {
    candidates_.clear();
    Gram grams[COUNT];
    for (int at = 0; at < COUNT; ++at) {
      if (!tail.holds(LENGTHS[at])) continue;
      grams[at] = tail.gram(LENGTHS[at]);
      auto found = text.follows.find(grams[at]);
      if (found != text.follows.end() && !of(found->second)) candidates_.push_back({found->second, (at + 1) * OWN});
    }
    for (int at = 0; at < COUNT; ++at) {
      if (!tail.holds(LENGTHS[at])) continue;
      int32_t token = others_.of(grams[at]);
      if (token == NOBODY) {
        auto found = phrases_->follows.find(grams[at]);
        if (found == phrases_->follows.end()) continue;
        token = found->second;
      }
      Candidate& candidate = entry(token);
      if (candidate.kind % OWN == 0) candidate.kind += (at + 1) * OTHERS;
    }
    if (!tail.size) return;
    int32_t last = tail.tokens[tail.size - 1];
    auto known = after_.find(last);
    auto told = phrases_->after.find(last);
    if (known == after_.end() && told == phrases_->after.end()) return;
    Pair pair = known != after_.end() ? known->second : told->second;
    entry(pair.first).kind += 1;
    if (pair.second != pair.first) entry(pair.second).kind += 2;
  }

  Candidate* of(int32_t token) {
    for (Candidate& candidate : candidates_)
      if (candidate.token == token) return &candidate;
    return nullptr;
  }

  Candidate& entry(int32_t token) {
    if (Candidate* candidate = of(token)) return *candidate;
    candidates_.push_back({token, 0});
    return candidates_.back();
  }

  Best ranked(double foretold) const {
    int fortune = fortune_of(foretold);
    Best best;
    for (const Candidate& candidate : candidates_) {
      double share = confidence(candidate.kind, fortune);
      if (share > best.share) best = {share, best.share, candidate.token, best.token};
      else if (share > best.next_share) best.next_share = share, best.next = candidate.token;
    }
    return best;
  }

  double confidence(int kind, int fortune) const {
    int at = KINDS + kind * FORTUNES + fortune;
    double coarse = counts_[kind], fine = counts_[at];
    double share = (shares_[kind] * coarse + START * WEIGHT) / (coarse + WEIGHT);
    return (shares_[at] * fine + share * WEIGHT) / (fine + WEIGHT);
  }

  void learn(int kind, int fortune, bool right) {
    for (int at : {kind, KINDS + kind * FORTUNES + fortune}) {
      double count = counts_[at] = std::min(counts_[at] + 1.0, MEMORY);
      shares_[at] += ((right ? 1.0 : 0.0) - shares_[at]) / count;
    }
  }

  const Phrases* phrases_;
  const size_t entries_;
  Others others_;
  std::unordered_map<int32_t, Pair> after_;
  double counts_[KINDS * (FORTUNES + 1)] = {}, shares_[KINDS * (FORTUNES + 1)];
  std::vector<Candidate> candidates_;  // of the place that is looked at
};
}  // namespace

extern "C" {
Phrases* hispec_phrases() { return new Phrases; }

// grams [count, length + 1]: each with what follows it.
void hispec_phrases_follow(Phrases* phrases, const int32_t* grams, int64_t count, int64_t length) {
  phrases->follows.reserve(phrases->follows.size() + size_t(count));
  for (int64_t i = 0; i < count; ++i, grams += length + 1) {
    Gram gram;
    std::memcpy(gram.tokens, grams, size_t(length) * sizeof(int32_t));
    phrases->follows[gram] = grams[length];
  }
}

// after [count, 3]: a token and the two that follow it.
void hispec_phrases_after(Phrases* phrases, const int32_t* after, int64_t count) {
  for (int64_t i = 0; i < count; ++i, after += 3) phrases->after[after[0]] = {after[1], after[2]};
}

void hispec_phrases_free(Phrases* phrases) { delete phrases; }

// phrases: outlive it.
Lookup* hispec_lookup(const Phrases* phrases, int64_t entries) { return new Lookup(phrases, size_t(entries)); }

void hispec_lookup_free(Lookup* lookup) { delete lookup; }

// Begins a text anew.
void hispec_lookup_begin(Lookup* lookup, int64_t id, const int64_t* ends, int64_t count) {
  Text& text = lookup->texts[id] = Text{};
  for (int64_t i = 0; i < count; ++i) text.ends.insert(int32_t(ends[i]));
}

void hispec_lookup_end(Lookup* lookup, int64_t id) { lookup->texts.erase(id); }

// Takes up what is new of a text and returns how many guesses were made, `most` at most.
// numbers: tokens of the prompt, then written ones, the full depth's second choices at these, and tentative ones.
// guesses [2, most]: tokens and other candidates, -1 where there is none; chances [most].
int64_t hispec_lookup_propose(Lookup* lookup, int64_t id, const int64_t* numbers, int64_t read, int64_t written, int64_t tentative, int64_t most,
                              double least, double each, int64_t* guesses, double* chances) {
  Text& text = lookup->texts.at(id);
  for (int64_t i = 0; i < read; ++i) text.note(int32_t(numbers[i]));
  numbers += read;
  lookup->take_up(text, numbers, numbers + written, written);
  return lookup->propose(text, numbers + 2 * written, tentative, most, least, each, guesses, guesses + most, chances);
}
}
