#include "from_arguments.h"

#include "specmeta/grid.h"

namespace specmeta {
namespace {

Rows rows_params(Arguments& args) {
  Rows rows;
  if (args.has(Arg::row_to_slot)) rows.row_to_slot = args.ints(Arg::row_to_slot);
  rows.num_rows = args.int32(Arg::num_rows);
  rows.num_rows_int = args.integer(Arg::num_rows_int, kInt32Max);
  rows.status = args.int32(Arg::status);
  if (rows.num_rows && args.has(Arg::num_rows_int)) args.fail(Arg::num_rows, "a tensor or an integer", "both");
  for (const char symbol : {'U', 'T'}) {  // slot_mapping may be longer
    if (args.size(symbol) >= 0) rows.tokens = args.size(symbol);
  }

  // B and S: from what is by row and by slot, else from each other, else from status.
  const bool by_slot = args.has(Arg::row_to_slot);
  const int64_t status_length = rows.status ? args.length(Arg::status) : -1;
  int64_t batch = args.size('B');
  for (const int64_t size : {args.size('S'), status_length}) {
    if (batch < 0) batch = size;
  }
  rows.batch = static_cast<int32_t>(batch);
  if (rows.batch < 0) args.fail(Arg::cu_seqlens_q, "a tensor, since no other one tells the number of rows", "None");
  if (args.size('S') >= 0) {
    rows.slots = args.size('S');
  } else if (!by_slot) {
    rows.slots = rows.batch;
  } else if (rows.status) {
    rows.slots = static_cast<int32_t>(max64(status_length - 1, 0));
  }
  if (!by_slot && rows.slots != rows.batch) {
    args.fail(args.origin('B'),
              std::to_string(rows.slots) + " rows, as many as " + arg_name(args.origin('S')) +
                  " has slots, unless row_to_slot is given",
              std::to_string(rows.batch));
  }
  if (args.has(Arg::workspace)) {
    const int64_t steps = args.has(Arg::num_steps) ? args.integer(Arg::num_steps, 1) : 1;
    const int64_t needed = workspace_words(rows.batch, steps);
    if (args.size('X') < needed) {
      args.fail(Arg::workspace, "at least " + std::to_string(needed) + " entries for B = " + std::to_string(rows.batch),
                std::to_string(args.size('X')));
    }
    rows.workspace = reinterpret_cast<uint64_t*>(args.int64(Arg::workspace));
    rows.workspace_words = args.size('X') / steps / kSectorWords * kSectorWords;
    // Rows stand in it sector by sector.
    if (reinterpret_cast<uintptr_t>(rows.workspace) % 32 != 0) {
      args.fail(Arg::workspace, "memory on a boundary of 32 bytes", "a part of some other tensor");
    }
  }
  const int64_t wanted = by_slot ? int64_t{rows.slots} + 1 : rows.batch;
  if (rows.status && status_length != wanted) {
    args.fail(Arg::status, std::string("shape [") + (by_slot ? "S+1" : "B") + "] = [" + std::to_string(wanted) + "]",
              "[" + std::to_string(status_length) + "]");
  }
  return rows;
}

// Without cu_seqlens_q row b owns token b.
void check_one_token_a_row(Arguments& args, const Rows& rows) {
  if (!rows.cu_seqlens_q && rows.tokens < rows.batch) {
    args.fail(args.origin(args.size('T') >= 0 ? 'T' : 'U'),
              "at least B = " + std::to_string(rows.batch) + " entries, one a row without cu_seqlens_q",
              std::to_string(rows.tokens));
  }
}

Pages pages_params(Arguments& args) {
  Pages pages;
  pages.page_size = Divider(args.integer(Arg::page_size, 1));
  pages.max_seq_len = static_cast<int32_t>(args.integer(Arg::max_seq_len, kInt32Max));
  pages.page_table = args.table(Arg::page_table);
  pages.num_pages = args.int32(Arg::num_pages);
  pages.alloc_pages = args.int32(Arg::alloc_pages);
  pages.alloc_indptr = args.int32(Arg::alloc_indptr);
  if (pages.alloc_pages) pages.num_alloc = args.size('A');
  if (pages.page_table && pages.alloc_pages) args.fail(Arg::alloc_pages, "None, since page_table is given", "a tensor");
  args.needs(Arg::num_pages, {Arg::page_table});
  args.all_or_none({Arg::alloc_pages, Arg::alloc_indptr});
  return pages;
}

// The length of slot_mapping.
int32_t count_slots(Arguments& args, const Rows& rows) {
  if (!args.has(Arg::slot_mapping)) return 0;
  if (args.size('U') < rows.tokens) {
    args.fail(Arg::slot_mapping,
              "at least T = " + std::to_string(rows.tokens) + " entries, as " + arg_name(args.origin('T')) + " has",
              std::to_string(args.size('U')));
  }
  return args.size('U');
}

// `out`: a Layout, or the same for all steps of a draft loop.
template <class Output>
void read_padding(Arguments& args, Output& out) {
  out.pad_page = static_cast<int32_t>(args.integer(Arg::pad_page, 0));
  out.pad_slot = args.integer(Arg::pad_slot, -1);
  out.pad_seq_len = static_cast<int32_t>(args.integer(Arg::pad_seq_len, 0));
}

// Padding rows have their places in kv_indices.
void check_capacity(Arguments& args, const Rows& rows, int32_t pad_seq_len, int32_t capacity) {
  if (args.has(Arg::kv_indices) && pad_seq_len == 1 && capacity < rows.batch) {
    args.fail(Arg::kv_indices, "at least B = " + std::to_string(rows.batch) + " entries with pad_seq_len 1",
              std::to_string(capacity));
  }
}

Layout layout_params(Arguments& args, const Rows& rows) {
  Layout layout;
  read_padding(args, layout);
  layout.cached_lens = args.int32(Arg::cached_lens);
  layout.use_initial_states = args.boolean_tensor(Arg::use_initial_states);
  layout.padded_seq_lens = args.ints(Arg::padded_seq_lens);
  layout.pages_per_seq = args.int32(Arg::pages_per_seq);
  layout.last_page_len = args.int32(Arg::last_page_len);
  layout.kv_indptr = args.int32(Arg::kv_indptr);
  layout.kv_indices = args.int32(Arg::kv_indices);
  if (layout.kv_indices) layout.kv_capacity = args.size('C');
  layout.block_table = args.table(Arg::block_table);
  layout.table_parts = Divider(max64((layout.block_table.width + kTablePart - 1) / kTablePart, 1));
  layout.slot_mapping = args.int64(Arg::slot_mapping);
  layout.num_slots = count_slots(args, rows);
  for (const Arg name : {Arg::kv_indices, Arg::block_table, Arg::slot_mapping})
    args.needs(name, {Arg::page_table, Arg::alloc_pages});
  check_capacity(args, rows, layout.pad_seq_len, layout.kv_capacity);
  return layout;
}

AcceptParams accept_params(Arguments& args) {
  AcceptParams p;
  p.rows = rows_params(args);
  p.rows.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  p.input_ids = args.ints(Arg::input_ids);
  p.num_draft_tokens = args.int32(Arg::num_draft_tokens);
  p.position_ids = args.ints(Arg::position_ids);
  p.seq_lens = args.ints(Arg::seq_lens);
  p.pad_token = args.integer(Arg::pad_token, 0);
  p.committed_lens = args.int32(Arg::committed_lens);
  p.known_lens = args.int32(Arg::known_lens);
  p.tokens = args.ints_table(Arg::tokens);
  p.num_drafts = args.int32(Arg::num_drafts);
  p.num_accepted = args.ints(Arg::num_accepted);
  p.num_rejected = args.int32(Arg::num_rejected);
  p.next_tokens = args.ints(Arg::next_tokens);
  p.num_sampled = args.ints(Arg::num_sampled);
  p.seq_lens_out = args.ints(Arg::seq_lens_out);
  p.token_indices = args.ints(Arg::token_indices);
  p.accepted_tokens = args.ints_table(Arg::accepted_tokens);
  p.emitted_width = Divider(max64(p.accepted_tokens.width, 1));
  p.draft_input_ids = args.ints(Arg::draft_input_ids);
  p.last_position_ids = args.ints(Arg::last_position_ids);
  check_one_token_a_row(args, p.rows);
  args.all_or_none({Arg::committed_lens, Arg::known_lens, Arg::tokens});
  args.needs(Arg::committed_lens, {Arg::seq_lens});
  args.needs(Arg::seq_lens_out, {Arg::seq_lens});
  args.needs(Arg::num_drafts, {Arg::committed_lens});
  args.needs(Arg::last_position_ids, {Arg::position_ids});
  args.needs(Arg::draft_input_ids, {Arg::input_ids});
  if (args.size('W') >= 0) {
    if (args.size('W') < 1 || args.size('W') > kMaxEmitted) {
      args.fail(args.has(Arg::accepted_tokens) ? Arg::accepted_tokens : Arg::sampled_tokens,
                args.size('W') < 1 ? "a width of at least 1" : "a width of at most " + std::to_string(kMaxEmitted),
                std::to_string(args.size('W')));
    }
    p.max_draft_len = args.size('W') - 1;
  }
  return p;
}

}  // namespace

AdvanceParams advance_params(Arguments& args) {
  AdvanceParams p;
  p.num_accepted = args.ints(Arg::num_accepted);
  p.num_counts = args.size('N');
  for (const Arg name : {Arg::count_index, Arg::max_accepted}) args.needs(name, {Arg::num_accepted});
  p.seq_lens = args.ints(Arg::seq_lens);
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.max_accepted = args.integer(Arg::max_accepted, -1);
  p.seq_len_bias = args.integer(Arg::seq_len_bias, 0);
  p.position_bias = args.integer(Arg::position_bias, 0);
  p.count_index = args.ints(Arg::count_index);
  p.rows.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  p.position_ids = args.ints(Arg::position_ids);
  p.position_ids_out = args.ints(Arg::position_ids_out);
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = args.has(Arg::seq_lens_out) ? args.ints(Arg::seq_lens_out) : p.seq_lens;
  check_one_token_a_row(args, p.rows);
  return p;
}

StageParams stage_params(Arguments& args) {
  StageParams p;
  p.committed_lens = args.int32(Arg::committed_lens);
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.pad_token = args.integer(Arg::pad_token, 0);
  p.limit_lens = args.int32(Arg::limit_lens);
  p.known_lens = args.int32(Arg::known_lens);
  p.num_drafts = args.int32(Arg::num_drafts);
  p.query_lens = args.int32(Arg::query_lens);
  p.tokens = args.ints_table(Arg::tokens);
  p.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  const Ints seq_lens = args.ints(Arg::seq_lens);
  p.position_ids = args.ints(Arg::position_ids);
  p.input_ids = args.ints(Arg::input_ids);
  p.num_draft_tokens = args.int32(Arg::num_draft_tokens);
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = seq_lens;
  if (!p.query_lens && !p.known_lens) args.fail(Arg::query_lens, "a tensor, unless known_lens is given", "None");
  args.needs(Arg::num_drafts, {Arg::known_lens});
  args.needs(Arg::num_draft_tokens, {Arg::known_lens});
  args.needs(Arg::input_ids, {Arg::tokens});
  return p;
}

AcceptParams accept_greedy_params(Arguments& args) {
  const Ints target_tokens = args.ints(Arg::target_tokens);
  AcceptParams p = accept_params(args);
  p.target_tokens = target_tokens;
  return p;
}

AcceptParams accept_sampled_params(Arguments& args) {
  const IntsTable sampled_tokens = args.ints_table(Arg::sampled_tokens);
  const int64_t vocab_size = args.integer(Arg::vocab_size, 1);
  AcceptParams p = accept_params(args);
  p.sampled_tokens = sampled_tokens;
  p.vocab_size = vocab_size;
  return p;
}

CountSampledParams count_sampled_params(Arguments& args) {
  CountSampledParams p;
  p.rows = rows_params(args);
  p.sampled_tokens = args.ints_table(Arg::sampled_tokens);
  p.vocab_size = args.integer(Arg::vocab_size, 1);
  p.discarded = args.boolean_tensor(Arg::discarded);
  p.backup_tokens = args.ints(Arg::backup_tokens);
  p.pad_token = args.integer(Arg::pad_token, 0);
  p.num_sampled = args.ints(Arg::num_sampled);
  p.next_tokens = args.ints(Arg::next_tokens);
  return p;
}

LocateSampledParams locate_sampled_params(Arguments& args) {
  LocateSampledParams p;
  p.rows = rows_params(args);
  p.rows.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  p.num_sampled = args.ints(Arg::num_sampled);
  p.cu_num_draft_tokens = args.int32(Arg::cu_num_draft_tokens);
  p.num_rejected = args.int32(Arg::num_rejected);
  p.token_indices = args.int32(Arg::token_indices);
  return p;
}

KeepLastParams keep_last_params(Arguments& args) {
  KeepLastParams p;
  p.rows = rows_params(args);
  p.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  p.seq_lens = args.ints(Arg::seq_lens);
  p.pad_token = args.integer(Arg::pad_token, 0);
  p.input_ids = args.ints(Arg::input_ids);
  p.position_ids = args.ints(Arg::position_ids);
  p.query_lens = args.int32(Arg::query_lens);
  p.cached_lens = args.int32(Arg::cached_lens);
  p.use_initial_states = args.boolean_tensor(Arg::use_initial_states);
  check_one_token_a_row(args, p.rows);  // so it is afterwards
  return p;
}

DraftListsParams draft_lists_params(Arguments& args) {
  DraftListsParams p;
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.seq_lens = args.ints(Arg::seq_lens);
  p.num_steps = static_cast<int32_t>(args.integer(Arg::num_steps, 1));
  read_padding(args, p);
  p.position_ids = args.ints(Arg::position_ids);
  p.last_page_len = args.table(Arg::last_page_len);
  p.kv_indptr = args.table(Arg::kv_indptr);
  p.kv_indices = args.table(Arg::kv_indices);
  p.slot_mapping = args.int64(Arg::slot_mapping);
  for (const Arg name : {Arg::kv_indices, Arg::slot_mapping}) args.needs(name, {Arg::page_table, Arg::alloc_pages});
  const int64_t num_tokens = int64_t{p.rows.batch} * p.num_steps;
  if (args.size('K') >= 0 && args.size('K') != p.num_steps) {
    args.fail(args.origin('K'), "num_steps = " + std::to_string(p.num_steps) + " rows", std::to_string(args.size('K')));
  }
  if (p.slot_mapping && args.size('T') != num_tokens) {
    args.fail(Arg::slot_mapping, "B * num_steps = " + std::to_string(num_tokens) + " entries",
              std::to_string(args.size('T')));
  }
  check_capacity(args, p.rows, p.pad_seq_len, p.kv_indices.width);
  return p;
}

MapSlotsParams map_slots_params(Arguments& args) {
  MapSlotsParams p;
  p.rows = rows_params(args);
  p.rows.cu_seqlens_q = args.int32(Arg::cu_seqlens_q);
  p.pages = pages_params(args);
  args.needs(Arg::slot_mapping, {Arg::page_table, Arg::alloc_pages});
  p.position_ids = args.ints(Arg::position_ids);
  p.slot_mapping = args.int64(Arg::slot_mapping);
  p.num_slots = count_slots(args, p.rows);
  p.pad_slot = args.integer(Arg::pad_slot, -1);
  check_one_token_a_row(args, p.rows);
  return p;
}

DraftStepParams draft_step_params(Arguments& args) {
  DraftStepParams p;
  p.seq_lens = args.ints(Arg::seq_lens);
  p.rows = rows_params(args);
  p.pages = pages_params(args);
  p.pad_token = args.integer(Arg::pad_token, 0);
  p.num_rejected = args.int32(Arg::num_rejected);
  p.max_rejected = args.integer(Arg::max_rejected, kCountLimit);
  p.draft_tokens = args.ints(Arg::draft_tokens);
  p.draft_index = args.integer(Arg::draft_index, 0);
  p.shift = args.integer(Arg::shift, 1);
  p.last = args.boolean(Arg::last);
  p.known_lens = args.int32(Arg::known_lens);
  p.num_drafts = args.int32(Arg::num_drafts);
  p.written_lens = args.int32(Arg::written_lens);
  p.tokens = args.ints_table(Arg::tokens);
  p.position_ids = args.ints(Arg::position_ids);
  p.position_ids_out = args.ints(Arg::position_ids_out);
  p.input_ids = args.ints(Arg::input_ids);
  p.layout = layout_params(args, p.rows);
  p.layout.seq_lens = args.has(Arg::seq_lens_out) ? args.ints(Arg::seq_lens_out) : p.seq_lens;
  check_one_token_a_row(args, p.rows);
  args.all_or_none({Arg::tokens, Arg::known_lens, Arg::num_drafts});
  args.needs(Arg::tokens, {Arg::draft_tokens});
  args.needs(Arg::input_ids, {Arg::draft_tokens});
  args.needs(Arg::position_ids_out, {Arg::position_ids});
  return p;
}

}  // namespace specmeta
