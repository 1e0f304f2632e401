// accept_greedy, accept_sampled: how many drafts stand; commit them; the inputs of the draft pass.
//
//   nd = num_draft_tokens[b];  base = the token before the first draft
//   greedy:   a = leading drafts that the target also chose;  emitted = target_tokens[base .. base + a]
//   sampled:  emitted = leading ids inside the vocabulary;    a = their number - 1
//   committed = seq_lens[b] - (nd - a)
//   a chunk of a longer prompt moves committed_lens only; any other row stores the bonus token and knows one token more
//   draft_input_ids = input_ids shifted left by one inside the row, the next token at base + a
#pragma once

#include "specmeta/sampled.h"
#include "specmeta/walk.h"

namespace specmeta {

// What there is to know of a row: one sector of memory.
struct alignas(32) AcceptRow {
  static constexpr bool kIsRepeatable = false;  // a row moves its slot's state

  int32_t token_begin = 0;
  int32_t tokens_end = 0;
  int32_t last_token = 0;  // the token that was accepted last; below token_begin where the row is empty
  int32_t base = 0;        // of the ids in accepted_tokens
  int32_t emitted = 0;     // their number
  int64_t next = 0;

  SPECMETA_HD int32_t token_end() const { return tokens_end; }
  static constexpr int32_t page_begin = 0, page_end = 0;
};

struct Acceptance {
  int32_t count = 0;  // a
  int32_t rejected = 0;
  int32_t kept = 0;     // query tokens that stand
  int32_t emitted = 0;  // ids in accepted_tokens
  int32_t base = 0;
  int64_t next = 0;
};

// The row's length where it is given; false where it empties the row.
SPECMETA_HD bool check_length(const AcceptParams& p, int32_t b, int32_t q, RowCheck& check, int64_t& length) {
  if (!p.seq_lens) return true;
  length = p.seq_lens.get_count(b);
  if (length < 0) {
    check.faults |= kBadCount;
  } else if (length > 0 && length < q) {
    check.faults |= kUnderflow;
  }
  return length >= q;  // q >= 1
}

SPECMETA_HD Acceptance verify(const AcceptParams& p, int32_t b, const TokenSpan& span, RowCheck& check) {
  Acceptance accepted;
  const int32_t most = min32(span.q() - 1, p.max_draft_len);
  int32_t nd = most;
  if (p.num_draft_tokens) {
    nd = load(p.num_draft_tokens + b);
    if (nd < 0 || nd > most) check.faults |= kBadCount;
    nd = min32(max32(nd, 0), most);
  }
  const int32_t base = span.end - 1 - nd;
  int32_t a = 0;
  if (p.target_tokens) {
    while (a < nd) {
      const int64_t draft = p.input_ids.get(base + a + 1);
      if (draft < 0 || draft != p.target_tokens.get(base + a)) break;
      ++a;
    }
    accepted.emitted = a + 1;
    accepted.next = p.target_tokens.get(base + a);
  } else {
    accepted.next = p.pad_token;
    accepted.emitted = count_ids(p.sampled_tokens, p.vocab_size, b, nd + 1, accepted.next);
    a = max32(accepted.emitted - 1, 0);
  }
  accepted.count = a;
  accepted.rejected = nd - a;
  accepted.kept = accepted.emitted > 0 ? span.q() - accepted.rejected : 0;
  accepted.base = base;
  return accepted;
}

// Moves the slot's state (its length is given then).
SPECMETA_HD void commit(const AcceptParams& p, int64_t length, int32_t q, RowCheck& check, Acceptance& accepted) {
  const int32_t s = check.slot;
  const int64_t committed = length - accepted.rejected;
  const int64_t ledger = p.tokens.width;
  if (committed < load(p.known_lens + s)) {  // a chunk of a longer prompt: the next token is known already
    store(p.committed_lens + s, saturate32(committed));
    accepted.emitted = 0;
    accepted.kept = q - accepted.rejected;
    accepted.next = committed < ledger ? p.tokens.get(s, committed) : p.pad_token;
    if (committed >= ledger) check.faults |= kOverflow;
  } else if (accepted.emitted == 0) {  // void: the step can be tried again
    check.faults |= kBadCount;
  } else {
    store(p.committed_lens + s, saturate32(committed));
    store(p.known_lens + s, saturate32(min64(committed + 1, ledger)));
    if (committed < ledger) {
      p.tokens.set(s, committed, accepted.next);
    } else {
      check.faults |= kOverflow;
    }
  }
  if (p.num_drafts) store(p.num_drafts + s, 0);
}

// Places row b: verifies it, moves its state, and writes what is by row. Called by every thread of a tile.
template <class Cta>
SPECMETA_HD AcceptRow accept_row(Cta& cta, const AcceptParams& p, int32_t b, int32_t live) {
  const TokenSpan read = read_span(p.rows, b, live);
  RowCheck check = check_slot(p.rows, b, live);
  const TokenSpan span = locate(cta, p.rows, b, live, read, check);
  int64_t length = 0;
  const bool empty = !check.alive || span.q() == 0 || !check_length(p, b, span.q(), check, length);

  Acceptance accepted;
  accepted.next = p.pad_token;
  if (!empty) {
    accepted = verify(p, b, span, check);
    if (p.committed_lens) {
      commit(p, length, span.q(), check, accepted);
    } else if (accepted.emitted == 0) {
      check.faults |= kBadCount;
    }
  }
  report(cta, p.rows, check);

  AcceptRow row;
  row.token_begin = span.begin;
  row.tokens_end = span.end;
  row.last_token = empty ? span.begin - 1 : accepted.base + accepted.count;
  row.base = accepted.base;
  row.emitted = accepted.emitted;
  row.next = accepted.next;
  if (b >= p.rows.batch) return row;
  if (p.num_accepted) p.num_accepted.set(b, accepted.count);
  if (p.num_rejected) store(p.num_rejected + b, accepted.rejected);
  if (p.num_sampled) p.num_sampled.set(b, accepted.emitted);
  if (p.seq_lens_out) p.seq_lens_out.set(b, empty ? 0 : length - span.q() + accepted.kept);
  if (p.next_tokens) p.next_tokens.set(b, accepted.next);
  if (p.token_indices) {
    int64_t index = row.last_token;
    if (empty) index = padding_index(p.rows, b);
    p.token_indices.set(b, index);
  }
  if (p.last_position_ids) p.last_position_ids.set(b, empty ? 0 : p.position_ids.get(row.last_token));
  return row;
}

template <class Cta>
SPECMETA_HD void accept(Cta& cta, const AcceptParams& p) {
  const int32_t live = live_rows(p.rows);
  const IntsTable& emitted = p.accepted_tokens;

  const Covered all = walk(
      cta, p.rows.batch, p.draft_input_ids || emitted, [&](int32_t, int32_t b) { return accept_row(cta, p, b, live); },
      [&](const Window& window) {
        const AcceptRow* tile = cta.tile();
        if (emitted) {  // the table's elements are shared among the threads, too
          const uint32_t width = emitted.width, end = window.num_rows * width;
          SPECMETA_NO_UNROLL
          for (uint32_t i = window.first_own * width + cta.rank(); i < end; i += cta.size()) {
            const auto r = static_cast<int32_t>(p.emitted_width.div(i));
            const auto j = static_cast<int32_t>(p.emitted_width.mod(i));
            const AcceptRow& row = tile[r];
            const int32_t b = window.first + r;
            int64_t id = -1;
            if (j < row.emitted) id = p.target_tokens ? p.target_tokens.get(row.base + j) : p.sampled_tokens.get(b, j);
            emitted.set(b, j, id);
          }
        }
        if (p.draft_input_ids) {
          for_tokens(
              cta, window,
              TokenCopy{[from = p.input_ids, pad_token = p.pad_token](int32_t t, const AcceptRow& row) {
                          return t < row.last_token ? from.get(t + 1) : t == row.last_token ? row.next : pad_token;
                        },
                        [to = p.draft_input_ids](int32_t t, const AcceptRow&, int32_t, int64_t id) { to.set(t, id); }});
        }
      });
  if (p.draft_input_ids) {
    for_padding(cta, p.rows, all, [&](int32_t t) { p.draft_input_ids.set(t, p.pad_token); });
  }
}

}  // namespace specmeta
