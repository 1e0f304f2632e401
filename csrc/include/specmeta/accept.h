// accept_greedy, accept_sampled: how many drafts stand; commit them; the inputs of the draft pass.
//
//   nd = num_draft_tokens[b];  base = the token before the first draft
//   greedy:   a = leading drafts that the target also chose;  emitted = target_tokens[base .. base + a]
//   sampled:  emitted = leading ids inside the vocabulary;    a = their number - 1
//   committed = seq_lens[b] - (nd - a)
//   a chunk of a longer prompt moves committed_lens only; any other row stores the bonus token and knows one token more
//   draft_input_ids = input_ids shifted left by one inside the row, the next token at base + a
#pragma once

#include "specmeta/rows.h"

namespace specmeta {

// A tile's row.
struct AcceptRow : TokenSpan {
  int32_t last_token = 0;  // the token that was accepted last; below token_begin where the row is empty
  int64_t next = 0;
};

struct Acceptance {
  int64_t count = 0;  // a
  int64_t rejected = 0;
  int64_t emitted = 0;  // ids in accepted_tokens
  int64_t base = 0;
  int64_t next = 0;
};

// The row's length where it is given; false where it empties the row.
SPECMETA_HD bool check_length(const AcceptParams& p, int64_t b, int64_t q, RowCheck& check, int64_t& length) {
  if (!p.seq_lens) return true;
  length = p.seq_lens.get_count(b);
  if (length < 0) {
    check.faults |= kBadCount;
  } else if (length > 0 && length < q) {
    check.faults |= kUnderflow;
  }
  return length >= q;  // q >= 1
}

SPECMETA_HD Acceptance verify(const AcceptParams& p, int64_t b, const TokenSpan& span, RowCheck& check) {
  Acceptance accepted;
  const int64_t most = min64(span.q() - 1, p.max_draft_len);
  int64_t nd = most;
  if (p.num_draft_tokens) {
    nd = p.num_draft_tokens[b];
    if (nd < 0 || nd > most) check.faults |= kBadCount;
    nd = clamp64(nd, 0, most);
  }
  const int64_t base = span.token_end - 1 - nd;
  int64_t a = 0;
  if (p.target_tokens) {
    while (a < nd) {
      const int64_t draft = p.input_ids.get(base + a + 1);
      if (draft < 0 || draft != p.target_tokens.get(base + a)) break;
      ++a;
    }
    accepted.emitted = a + 1;
    accepted.next = p.target_tokens.get(base + a);
  } else {
    int64_t v = 0;
    while (v <= nd) {
      const int64_t id = p.sampled_tokens.get(b, v);
      if (id < 0 || id >= p.vocab_size) break;
      accepted.next = id;
      ++v;
    }
    a = max64(v - 1, 0);
    accepted.emitted = v;
    if (v == 0) accepted.next = p.pad_token;
  }
  accepted.count = a;
  accepted.rejected = nd - a;
  accepted.base = base;
  return accepted;
}

// Moves the slot's state (its length is given then).
SPECMETA_HD void commit(const AcceptParams& p, int64_t length, RowCheck& check, Acceptance& accepted) {
  const int64_t s = check.slot;
  const int64_t committed = length - accepted.rejected;
  const int64_t ledger = p.tokens.width;
  if (committed < p.known_lens[s]) {  // a chunk of a longer prompt: the next token is known already
    p.committed_lens[s] = saturate32(committed);
    accepted.emitted = 0;
    accepted.next = committed < ledger ? p.tokens.get(s, committed) : p.pad_token;
    if (committed >= ledger) check.faults |= kOverflow;
  } else if (accepted.emitted == 0) {  // void: the step can be tried again
    check.faults |= kBadCount;
  } else {
    p.committed_lens[s] = saturate32(committed);
    p.known_lens[s] = saturate32(min64(committed + 1, ledger));
    if (committed < ledger) {
      p.tokens.set(s, committed, accepted.next);
    } else {
      check.faults |= kOverflow;
    }
  }
  if (p.num_drafts) p.num_drafts[s] = 0;
}

SPECMETA_HD int64_t emitted_token(const AcceptParams& p, int64_t b, int64_t base, int64_t i) {
  return p.target_tokens ? p.target_tokens.get(base + i) : p.sampled_tokens.get(b, i);
}

template <class Cta>
SPECMETA_HD void accept(Cta& cta, const AcceptParams& p) {
  const int64_t live = live_rows(p.rows);
  TokenRanges ranges(p.rows, live);

  for (int64_t first = 0; first < p.rows.batch; first += cta.size()) {
    const int64_t b = first + cta.rank();
    RowCheck check = check_slot(p.rows, b, live);
    AcceptRow row;
    ranges.locate(cta, first, b, check, row);
    int64_t length = 0;
    const bool empty = !check.alive || row.q() == 0 || !check_length(p, b, row.q(), check, length);

    Acceptance accepted;
    accepted.next = p.pad_token;
    if (!empty) {
      accepted = verify(p, b, row, check);
      if (p.committed_lens) {
        commit(p, length, check, accepted);
      } else if (accepted.emitted == 0) {
        check.faults |= kBadCount;
      }
    }
    row.next = accepted.next;
    row.last_token = empty ? row.token_begin - 1 : saturate32(accepted.base + accepted.count);
    report(cta, p.rows, check);

    if (b < p.rows.batch) {
      if (p.num_accepted) p.num_accepted.set(b, accepted.count);
      if (p.num_rejected) p.num_rejected[b] = saturate32(accepted.rejected);
      if (p.next_tokens) p.next_tokens.set(b, accepted.next);
      if (p.token_indices) {
        const int64_t begin = p.rows.cu_seqlens_q ? p.rows.cu_seqlens_q[b] : b;
        p.token_indices[b] = saturate32(empty ? clamp64(begin, 0, max64(p.rows.tokens - 1, 0)) : row.last_token);
      }
      if (p.last_position_ids) p.last_position_ids.set(b, empty ? 0 : p.position_ids.get(row.last_token));
      for (int64_t i = 0; p.accepted_tokens && i < p.accepted_tokens.width; ++i) {
        p.accepted_tokens.set(b, i, i < accepted.emitted ? emitted_token(p, b, accepted.base, i) : -1);
      }
    }
    if (p.draft_input_ids) {
      cta.tile()[cta.rank()] = row;
      cta.sync();
      ranges.for_tokens(cta, [&](int64_t t, const AcceptRow& r) {
        p.draft_input_ids.set(t,
                              t < r.last_token ? p.input_ids.get(t + 1) : (t == r.last_token ? r.next : p.pad_token));
      });
      cta.sync();  // the tile is read until here
    }
  }
  if (p.draft_input_ids) {
    ranges.for_padding(cta, [&](int64_t t) { p.draft_input_ids.set(t, p.pad_token); });
  }
}

}  // namespace specmeta
