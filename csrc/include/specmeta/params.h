// The arguments of every operation, as plain pointers and sizes. A null pointer is an argument that was not given.
//
// B rows, S slots, T tokens, P pages a slot can hold, M block_table's width, L the ledger's width, K + 1
// accepted_tokens' width.
#pragma once

#include "specmeta/common.h"

namespace specmeta {

// Which rows there are, whose they are, and where faults are reported.
struct Rows {
  int32_t batch = 0;                      // B
  int32_t slots = kUnknownSize;           // S
  int32_t tokens = kInt32Max;             // T, the largest value where nothing tells it
  Ints row_to_slot;                       // [B]; absent: slot = row
  const int32_t* num_rows = nullptr;      // [1]
  int64_t num_rows_int = kInt32Max;       // used where num_rows is absent
  const int32_t* cu_seqlens_q = nullptr;  // [B+1]; absent: row b owns token b
  int32_t* status = nullptr;              // [S+1] with row_to_slot, else [B]
  uint64_t* workspace = nullptr;          // [X], see grid.h; absent: one Cta does everything
  int64_t workspace_words = 0;            // X; in draft_lists, of each step
};

// What the host reserved: a padded table by slot, or a ragged list, or nothing (then only max_seq_len limits).
struct Pages {
  Table page_table;                       // [S, P]
  const int32_t* num_pages = nullptr;     // [S]; absent: up to the first negative id
  const int32_t* alloc_pages = nullptr;   // [A]
  const int32_t* alloc_indptr = nullptr;  // [S+1]
  int32_t num_alloc = 0;                  // A
  Divider page_size;
  int32_t max_seq_len = kInt32Max;
};

// The elements of a tile's rows of accepted_tokens are counted in 31 bits.
inline constexpr int32_t kMaxEmitted = 1 << 20;
// block_table is written in parts of so many columns.
inline constexpr int32_t kTablePart = 4096;

// What attention reads for a row, and where its tokens are written.
struct Layout {
  Ints seq_lens;                          // [B] output
  int32_t* cached_lens = nullptr;         // [B]
  uint8_t* use_initial_states = nullptr;  // [B]
  Ints padded_seq_lens;                   // [B]
  int32_t* pages_per_seq = nullptr;       // [B]
  int32_t* last_page_len = nullptr;       // [B]
  int32_t* kv_indptr = nullptr;           // [B+1]
  int32_t* kv_indices = nullptr;          // [kv_capacity]
  int32_t kv_capacity = 0;
  Table block_table;                // [B, M]
  Divider table_parts;              // of a row of it, ceil(M / kTablePart)
  int64_t* slot_mapping = nullptr;  // [U]; what is behind the T tokens is padding
  int32_t num_slots = 0;            // U
  int64_t pad_slot = -1;
  int32_t pad_page = 0;
  int32_t pad_seq_len = 0;  // 0 or 1

  SPECMETA_HD bool has_lists() const { return kv_indices || block_table; }
};

struct AdvanceParams {
  Rows rows;
  Pages pages;
  Layout layout;
  Ints num_accepted;          // [N]; absent: 0 for each row
  int32_t num_counts = 0;     // N
  Ints count_index;           // [B]; absent: the row's slot
  Ints seq_lens;              // [B]
  Ints position_ids;          // [T]
  Ints position_ids_out;      // [T]
  int64_t max_accepted = -1;  // -1: not given
  int64_t seq_len_bias = 0;
  int64_t position_bias = 0;
};

struct StageParams {
  Rows rows;  // cu_seqlens_q is an output here: see below
  Pages pages;
  Layout layout;
  const int32_t* committed_lens = nullptr;  // [S]
  const int32_t* limit_lens = nullptr;      // [S]
  const int32_t* known_lens = nullptr;      // [S]
  const int32_t* num_drafts = nullptr;      // [S]
  const int32_t* query_lens = nullptr;      // [B]
  IntsTable tokens;                         // [S, L]
  int32_t* cu_seqlens_q = nullptr;          // [B+1] output
  int32_t* num_draft_tokens = nullptr;      // [B] output
  Ints position_ids;                        // [T] output
  Ints input_ids;                           // [T] output
  int64_t pad_token = 0;
};

// accept_greedy (target_tokens given) and accept_sampled (sampled_tokens given).
struct AcceptParams {
  Rows rows;
  Ints target_tokens;                         // [T]
  IntsTable sampled_tokens;                   // [B, K+1]
  int64_t vocab_size = 0;                     // with sampled_tokens
  int32_t max_draft_len = kInt32Max;          // K
  Ints input_ids;                             // [T]
  const int32_t* num_draft_tokens = nullptr;  // [B]; absent: every query token but the first
  Ints position_ids;                          // [T]
  Ints seq_lens;                              // [B]
  int32_t* committed_lens = nullptr;          // [S] state, as the three below
  int32_t* known_lens = nullptr;              // [S]
  IntsTable tokens;                           // [S, L]
  int32_t* num_drafts = nullptr;              // [S]
  Ints num_accepted;                          // [B] outputs from here
  Ints num_sampled;                           // [B]
  Ints seq_lens_out;                          // [B]
  int32_t* num_rejected = nullptr;            // [B]
  Ints next_tokens;                           // [B]
  Ints token_indices;                         // [B]
  IntsTable accepted_tokens;                  // [B, K+1]
  Divider emitted_width;                      // its width
  Ints draft_input_ids;                       // [T]
  Ints last_position_ids;                     // [B]
  int64_t pad_token = 0;
};

struct CountSampledParams {
  Rows rows;
  IntsTable sampled_tokens;  // [B, K+1]
  int64_t vocab_size = 0;
  const uint8_t* discarded = nullptr;  // [B]
  Ints backup_tokens;                  // [B]
  Ints next_tokens;                    // [B] output
  Ints num_sampled;                    // [B] output
  int64_t pad_token = 0;
};

struct LocateSampledParams {
  Rows rows;
  Ints num_sampled;                              // [B]
  const int32_t* cu_num_draft_tokens = nullptr;  // [B]
  int32_t* token_indices = nullptr;              // [B] output
  int32_t* num_rejected = nullptr;               // [B] output
};

struct KeepLastParams {
  Rows rows;
  int32_t* cu_seqlens_q = nullptr;        // [B+1], updated
  Ints seq_lens;                          // [B], updated
  Ints input_ids;                         // [T], updated
  Ints position_ids;                      // [T] output from here
  int32_t* query_lens = nullptr;          // [B]
  int32_t* cached_lens = nullptr;         // [B]
  uint8_t* use_initial_states = nullptr;  // [B]
  int64_t pad_token = 0;
};

struct DraftListsParams {
  Rows rows;
  Pages pages;
  Ints seq_lens;                    // [B]
  int32_t num_steps = 0;            // K
  Ints position_ids;                // [B] output from here
  Table kv_indptr;                  // [K, B+1]
  Table kv_indices;                 // [K, C]
  Table last_page_len;              // [K, B]
  int64_t* slot_mapping = nullptr;  // [B*K]
  int64_t pad_slot = -1;
  int32_t pad_page = 0;
  int32_t pad_seq_len = 0;
};

struct MapSlotsParams {
  Rows rows;
  Pages pages;
  Ints position_ids;                // [T]
  int64_t* slot_mapping = nullptr;  // [U] output; what is behind the T tokens is padding
  int32_t num_slots = 0;            // U
  int64_t pad_slot = -1;
};

struct DraftStepParams {
  Rows rows;
  Pages pages;
  Layout layout;
  Ints seq_lens;                          // [B]
  const int32_t* num_rejected = nullptr;  // [B]
  int64_t max_rejected = kCountLimit;
  Ints draft_tokens;  // [B]
  int64_t draft_index = 0;
  int64_t shift = 1;
  bool last = false;
  const int32_t* known_lens = nullptr;  // [S]
  int32_t* num_drafts = nullptr;        // [S]
  int32_t* written_lens = nullptr;      // [S]
  IntsTable tokens;                     // [S, L]
  Ints position_ids;                    // [T]
  Ints position_ids_out;                // [T]
  Ints input_ids;                       // [T] output
  int64_t pad_token = 0;
};

}  // namespace specmeta
