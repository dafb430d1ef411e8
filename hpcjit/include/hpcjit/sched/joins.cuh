// Which shares of a pair a block adds to its own, and where the result goes: a pure function (attention/decode_join.cuh).
//
// Of each kFan neighbouring shares one block has those of the others, for each row, and passes the sum on in its slot; a
// block of the first group has those sums. The rows of a group are dealt to its first blocks, kJoiners at most.
#pragma once
#include <limits.h>

#include "hpcjit/sched/folded.cuh"

namespace hpcjit::sched {

constexpr int kFan = 12, kJoiners = 2;

// Neighbouring shares of a pair, [begin, begin + size), of which the first `joiners` join rows.
struct Group {
  int begin;
  int size;
  int joiners;

  // Four neighbouring rows stay together: their warps have a scheduler each.
  HPCJIT_BOTH int joiner_of(int n) const { return n / 4 % 2 & (joiners - 1); }
};

// The pair's last share joins nothing, unless it is alone: its block may have other pieces to do.
HPCJIT_BOTH Group group_of(int index, int splits) {
  const int begin = index * kFan, rest = splits - begin, size = rest < kFan ? rest : kFan;
  const int most = size - (begin + size == splits ? 1 : 0);
  return {begin, size, most < 1 ? 1 : most < kJoiners ? most : kJoiners};
}

// The shares that a row waits for: `count` of them, `step` apart, without the one at `skip`; the last lies `last` further on.
struct Others {
  int count;
  int first;
  int step;
  int skip;
  int last;

  HPCJIT_BOTH int split(int i) const {
    return first + i * step + (i >= skip ? 1 : 0) + (i == count - 1 ? last : 0);
  }
};

// What a block does with row n of its share `split` of a pair in two parts or more: it joins on so many levels, and passes the
// row on or, after the last one, writes it.
struct Turn {
  int levels;
  bool passes;
};

HPCJIT_BOTH Turn turn_of(const Group& group, int groups, int split, int n) {
  const int levels = split != group.begin + group.joiner_of(n) ? 0 : group.begin > 0 || groups == 1 ? 1 : 2;
  return {levels, levels == 0 || group.begin > 0};
}

// Whom row n waits for on a level; `last` is the pair's last group.
HPCJIT_BOTH Others others_of(const Group& group, const Group& last, int groups, int n, int level) {
  const int joiner = group.joiner_of(n);
  if (level == 0) return {group.size - 1, group.begin, 1, joiner, 0};
  // All groups but the last have as many joiners as this one. Of two, the second is the last.
  const int of_last = last.joiner_of(n), usual = groups > 2 ? joiner : of_last;
  return {groups - 1, kFan + usual, kFan, INT_MAX, of_last - usual};
}

}  // namespace hpcjit::sched
