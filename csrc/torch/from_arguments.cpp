#include "from_arguments.h"

#include "specmeta/grid.h"

namespace specmeta {
namespace {

Rows rows_params(Arguments& args) {
  Rows rows;
  rows.row_to_slot = args.ints("row_to_slot");
  rows.num_rows = args.int32("num_rows");
  rows.num_rows_int = args.integer("num_rows_int", kInt32Max);
  rows.status = args.int32("status");
  if (rows.num_rows && args.has("num_rows_int")) args.fail("num_rows", "a tensor or an integer", "both");
  if (args.size('T') >= 0) rows.tokens = args.size('T');

  // B and S: from what is by row and by slot, else from each other, else from status.
  const bool by_slot = args.has("row_to_slot");
  const int64_t status_length = rows.status ? args.length("status") : -1;
  int64_t batch = args.size('B');
  for (const int64_t size : {args.size('S'), status_length}) {
    if (batch < 0) batch = size;
  }
  rows.batch = static_cast<int32_t>(batch);
  if (rows.batch < 0) args.fail("cu_seqlens_q", "a tensor, since no other one tells the number of rows", "None");
  if (args.size('S') >= 0) {
    rows.slots = args.size('S');
  } else if (!by_slot) {
    rows.slots = rows.batch;
  } else if (rows.status) {
    rows.slots = static_cast<int32_t>(max64(status_length - 1, 0));
  }
  if (!by_slot && rows.slots != rows.batch) {
    args.fail("row_to_slot",
              "a tensor, since there are " + std::to_string(rows.slots) + " slots and " + std::to_string(rows.batch) +
                  " rows",
              "None");
  }
  if (args.has("workspace")) {
    const int64_t needed = workspace_words(rows.batch);
    if (args.size('X') < needed) {
      args.fail("workspace", "at least " + std::to_string(needed) + " entries for B = " + std::to_string(rows.batch),
                std::to_string(args.size('X')));
    }
    rows.workspace = reinterpret_cast<uint64_t*>(args.int64("workspace"));
  }
  const int64_t wanted = by_slot ? int64_t{rows.slots} + 1 : rows.batch;
  if (rows.status && status_length != wanted) {
    args.fail("status", std::string("shape [") + (by_slot ? "S+1" : "B") + "] = [" + std::to_string(wanted) + "]",
              "[" + std::to_string(status_length) + "]");
  }
  return rows;
}

// Without cu_seqlens_q row b owns token b.
void check_one_token_a_row(Arguments& args, const Rows& rows) {
  if (!rows.cu_seqlens_q && rows.tokens < rows.batch) {
    args.fail(args.origin('T'),
              "at least B = " + std::to_string(rows.batch) + " entries, one a row without cu_seqlens_q",
              std::to_string(rows.tokens));
  }
}

Pages pages_params(Arguments& args) {
  Pages pages;
  pages.page_size = Divider(args.integer("page_size", 1));
  pages.max_seq_len = static_cast<int32_t>(args.integer("max_seq_len", kInt32Max));
  pages.page_table = args.table("page_table");
  pages.num_pages = args.int32("num_pages");
  pages.alloc_pages = args.int32("alloc_pages");
  pages.alloc_indptr = args.int32("alloc_indptr");
  if (pages.alloc_pages) pages.num_alloc = args.size('A');
  if (pages.page_table && pages.alloc_pages) args.fail("alloc_pages", "None, since page_table is given", "a tensor");
  args.needs("num_pages", {"page_table"});
  args.all_or_none({"alloc_pages", "alloc_indptr"});
  return pages;
}

Layout layout_params(Arguments& args, const Rows& rows) {
  Layout layout;
  layout.pad_page = static_cast<int32_t>(args.integer("pad_page", 0));
  layout.pad_slot = args.integer("pad_slot", -1);
  layout.pad_seq_len = static_cast<int32_t>(args.integer("pad_seq_len", 0));
  layout.cached_lens = args.int32("cached_lens");
  layout.padded_seq_lens = args.ints("padded_seq_lens");
  layout.pages_per_seq = args.int32("pages_per_seq");
  layout.last_page_len = args.int32("last_page_len");
  layout.kv_indptr = args.int32("kv_indptr");
  layout.kv_indices = args.int32("kv_indices");
  if (layout.kv_indices) layout.kv_capacity = args.size('C');
  layout.block_table = args.table("block_table");
  layout.table_parts = Divider(max64((layout.block_table.width + kTablePart - 1) / kTablePart, 1));
  layout.slot_mapping = args.int64("slot_mapping");
  for (const char* name : {"kv_indices", "block_table", "slot_mapping"})
    args.needs(name, {"page_table", "alloc_pages"});
  if (layout.kv_indices && layout.pad_seq_len == 1 && layout.kv_capacity < rows.batch) {
    args.fail("kv_indices", "at least B = " + std::to_string(rows.batch) + " entries with pad_seq_len 1",
              std::to_string(layout.kv_capacity));
  }
  return layout;
}

AcceptParams accept_params(Arguments& args) {
  AcceptParams p;
  p.rows = rows_params(args);
  p.rows.cu_seqlens_q = args.int32("cu_seqlens_q");
  p.input_ids = args.ints("input_ids");
  p.num_draft_tokens = args.int32("num_draft_tokens");
  p.position_ids = args.ints("position_ids");
  p.seq_lens = args.ints("seq_lens");
  p.pad_token = args.integer("pad_token", 0);
  p.committed_lens = args.int32("committed_lens");
  p.known_lens = args.int32("known_lens");
  p.tokens = args.ints_table("tokens");
  p.num_drafts = args.int32("num_drafts");
  p.num_accepted = args.ints("num_accepted");
  p.num_rejected = args.int32("num_rejected");
  p.next_tokens = args.ints("next_tokens");
  p.token_indices = args.int32("token_indices");
  p.accepted_tokens = args.ints_table("accepted_tokens");
  p.emitted_width = Divider(max64(p.accepted_tokens.width, 1));
  p.draft_input_ids = args.ints("draft_input_ids");
  p.last_position_ids = args.ints("last_position_ids");
  check_one_token_a_row(args, p.rows);
  args.all_or_none({"committed_lens", "known_lens", "tokens", "seq_lens"});
  args.needs("num_drafts", {"committed_lens"});
  args.needs("last_position_ids", {"position_ids"});
  args.needs("draft_input_ids", {"input_ids"});
  if (args.size('W') >= 0) {
    if (args.size('W') == 0)
      args.fail(args.has("accepted_tokens") ? "accepted_tokens" : "sampled_tokens", "a width of at least 1", "0");
    p.max_draft_len = args.size('W') - 1;
  }
  return p;
}

}  // namespace

AdvanceParams advance_params(Arguments& args) {
  AdvanceParams p;
  p.num_accepted = args.ints("num_accepted");
  p.num_counts = args.size('N');
  p.seq_lens = args.ints("seq_lens");
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.max_accepted = args.integer("max_accepted", -1);
  p.seq_len_bias = args.integer("seq_len_bias", 0);
  p.position_bias = args.integer("position_bias", 0);
  p.count_index = args.int32("count_index");
  p.rows.cu_seqlens_q = args.int32("cu_seqlens_q");
  p.position_ids = args.ints("position_ids");
  p.position_ids_out = args.ints("position_ids_out");
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = args.has("seq_lens_out") ? args.ints("seq_lens_out") : p.seq_lens;
  check_one_token_a_row(args, p.rows);
  args.needs("position_ids_out", {"position_ids"});
  return p;
}

StageParams stage_params(Arguments& args) {
  StageParams p;
  p.committed_lens = args.int32("committed_lens");
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.pad_token = args.integer("pad_token", 0);
  p.limit_lens = args.int32("limit_lens");
  p.known_lens = args.int32("known_lens");
  p.num_drafts = args.int32("num_drafts");
  p.query_lens = args.int32("query_lens");
  p.tokens = args.ints_table("tokens");
  p.cu_seqlens_q = args.int32("cu_seqlens_q");
  const Ints seq_lens = args.ints("seq_lens");
  p.position_ids = args.ints("position_ids");
  p.input_ids = args.ints("input_ids");
  p.num_draft_tokens = args.int32("num_draft_tokens");
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = seq_lens;
  if (!p.query_lens && !p.known_lens) args.fail("query_lens", "a tensor, unless known_lens is given", "None");
  args.needs("num_drafts", {"known_lens"});
  args.needs("num_draft_tokens", {"known_lens"});
  args.needs("input_ids", {"tokens"});
  return p;
}

AcceptParams accept_greedy_params(Arguments& args) {
  const Ints target_tokens = args.ints("target_tokens");
  AcceptParams p = accept_params(args);
  p.target_tokens = target_tokens;
  return p;
}

AcceptParams accept_sampled_params(Arguments& args) {
  const IntsTable sampled_tokens = args.ints_table("sampled_tokens");
  const int64_t vocab_size = args.integer("vocab_size", 1);
  AcceptParams p = accept_params(args);
  p.sampled_tokens = sampled_tokens;
  p.vocab_size = vocab_size;
  return p;
}

DraftStepParams draft_step_params(Arguments& args) {
  DraftStepParams p;
  p.seq_lens = args.ints("seq_lens");
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.pad_token = args.integer("pad_token", 0);
  p.num_rejected = args.int32("num_rejected");
  p.max_rejected = args.integer("max_rejected", kCountLimit);
  p.draft_tokens = args.ints("draft_tokens");
  p.draft_index = args.integer("draft_index", 0);
  p.shift = args.integer("shift", 1);
  p.last = args.boolean("last");
  p.known_lens = args.int32("known_lens");
  p.num_drafts = args.int32("num_drafts");
  p.written_lens = args.int32("written_lens");
  p.tokens = args.ints_table("tokens");
  p.position_ids = args.ints("position_ids");
  p.position_ids_out = args.ints("position_ids_out");
  p.input_ids = args.ints("input_ids");
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = args.has("seq_lens_out") ? args.ints("seq_lens_out") : p.seq_lens;
  check_one_token_a_row(args, p.rows);
  args.all_or_none({"tokens", "known_lens", "num_drafts"});
  args.needs("tokens", {"draft_tokens"});
  args.needs("input_ids", {"draft_tokens"});
  args.needs("position_ids_out", {"position_ids"});
  return p;
}

}  // namespace specmeta
