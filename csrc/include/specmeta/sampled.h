// What a sampler has left in a row of sampled_tokens.
#pragma once

#include "specmeta/common.h"

namespace specmeta {

SPECMETA_HD bool is_id(int64_t id, int64_t vocab_size) {
  return id >= 0 && id < vocab_size;
}

// How many ids row b begins with, of at most `most`. `last` becomes the last of them, and stays where there is none.
SPECMETA_HD int32_t count_ids(const IntsTable& sampled, int64_t vocab_size, int32_t b, int32_t most, int64_t& last) {
  int32_t n = 0;
  for (; n < most; ++n) {
    const int64_t id = sampled.get(b, n);
    if (!is_id(id, vocab_size)) break;
    last = id;
  }
  return n;
}

}  // namespace specmeta
