// Many Ctas on one batch: the workspace through which they agree, and a Cta's part in that.
#pragma once

#include "specmeta/cta.h"
#include "specmeta/params.h"

namespace specmeta {

// The workspace, in 64-bit words. All but the records are zero between launches: the last Cta sees to that.
//
//   kTiles       from the lowest bits: tiles that have been taken, tiles whose rows are placed, Ctas that have begun.
//                A Cta takes a tile, and says that its last one is done, by one addition
//   kCtasDone    Ctas that have left, or have arrived
//   kNews ..     what was announced, + 1
//   kRecords ..  the rows, kRecordWords each
//   back from the end, kNumChains a tile: what it gives to a sum, + 1
//
// So a word has one meaning in launches of any number of rows, as long as all are given the same workspace.
class WorkspaceLayout {
 public:
  static constexpr int64_t kTiles = 0, kCtasDone = 1, kNews = 2, kHeader = kNews + kNumNews;
  static constexpr int kDone = 24, kBegun = 48;  // where these begin in kTiles
  static constexpr uint64_t kMask = (uint64_t{1} << kDone) - 1;
  static constexpr int64_t kRecords = 8, kRecordWords = 4;  // whole sectors

  SPECMETA_HD WorkspaceLayout(int32_t rows, int32_t tile_size)
      : rows_(rows), num_tiles_((static_cast<uint32_t>(rows) + tile_size - 1) / static_cast<uint32_t>(tile_size)) {}

  SPECMETA_HD int32_t num_tiles() const { return num_tiles_; }
  // How far from the end.
  SPECMETA_HD int64_t from_end(int chain, int32_t tile) const { return int64_t{kNumChains} * tile + chain + 1; }
  SPECMETA_HD int64_t num_chain_words() const { return int64_t{kNumChains} * num_tiles_; }
  SPECMETA_HD int64_t size() const { return kRecords + kRecordWords * rows_ + num_chain_words(); }

 private:
  int32_t rows_;
  int32_t num_tiles_;
};

inline constexpr int64_t kSectorWords = 4;

// The length of the workspace for launches of `rows` rows on a GPU, and for those of fewer; in draft_lists each step
// has a part of its own, of whole sectors.
SPECMETA_HD int64_t workspace_words(int32_t rows, int64_t steps = 1) {
  const int64_t words = WorkspaceLayout(rows, kTileRows).size();
  return (words + kSectorWords - 1) / kSectorWords * kSectorWords * steps;
}

// What a Cta needs for others beside it; Self is the Cta. It also has num_blocks(); on words that all Ctas share
//   peek(at), post(at, x)        relaxed
//   acquire(at), add(at, x)      add() returns what was there before; it acquires and releases
//   release(at, x), fence(at)    add() in two parts: release() only releases, and what it has seen released is acquired
//                                by fence()
//   pause()
//   index()                      which Cta of the launch this is
//   tile_rows()                  the rows of a tile, where there is more than one
//   step()                       which of several walks in one launch this is; each has its own part of the workspace
// and memory that its own threads share: GridState& grid_state().
template <class Self>
class GridCta {
 public:
  static constexpr bool kIsSerial = false;

  SPECMETA_HD explicit GridCta(const Rows& rows) : rows_(rows) {}

  SPECMETA_HD int32_t block() { return self().grid_state().block; }
  SPECMETA_HD bool places_all() { return is_alone() || is_replicated(); }
  SPECMETA_HD bool is_replicated() {
    return Self::Row::kIsRepeatable && !is_alone() && rows_.batch <= self().tile_rows();
  }
  SPECMETA_HD bool writes_rows() { return !is_replicated() || self().index() == 0; }
  // By the last thread, whose warp has the fewest tokens: it waits here for what it releases, for the answer only in
  // is_last().
  SPECMETA_HD uint64_t arrive() {
    return is_last_thread() ? self().release(workspace() + WorkspaceLayout::kCtasDone, 1) : 0;
  }
  SPECMETA_HD bool is_last(uint64_t arrival) {
    if (is_last_thread()) {
      const bool is_last = arrival + 1 == static_cast<uint64_t>(self().num_blocks());
      if (is_last) {
        self().fence(workspace() + WorkspaceLayout::kCtasDone);
        workspace()[WorkspaceLayout::kCtasDone] = 0;
      }
      self().grid_state().is_last = is_last;
    }
    self().sync();
    return self().grid_state().is_last;
  }
  SPECMETA_HD int64_t sum_before(Chain chain, int64_t x) {
    if (rows_.batch <= self().tile_rows()) return 0;
    if (is_alone()) {
      const int64_t before = self().grid_state().sums[chain];
      self().sync();
      if (self().rank() == 0) self().grid_state().sums[chain] = before + x;
      return before;
    }
    uint64_t* const end = workspace() + rows_.workspace_words;
    if (self().rank() == 0) self().post(end - layout().from_end(chain, tile_index()), static_cast<uint64_t>(x) + 1);
    int64_t sum = 0;
    SPECMETA_NO_UNROLL  // to unroll by a step that isn't known would take a division
        for (int32_t i = self().rank(); i < tile_index(); i += self().size()) sum +=
        wait(end - layout().from_end(chain, i));
    return self().sum(sum);
  }
  SPECMETA_HD void announce(News news, int64_t x) {
    if (self().rank() != 0 || rows_.batch <= self().tile_rows()) return;
    if (is_alone()) {
      self().grid_state().news[news] = x;
    } else {
      self().post(workspace() + WorkspaceLayout::kNews + news, static_cast<uint64_t>(x) + 1);
    }
  }
  SPECMETA_HD int64_t heed(News news) {
    if (is_alone()) return self().grid_state().news[news];
    return self().sum(self().rank() == 0 ? wait(workspace() + WorkspaceLayout::kNews + news) : 0);
  }
  SPECMETA_HD void finish_tiles() {
    if (self().rank() != 0) return;
    const uint64_t* const tiles = workspace() + WorkspaceLayout::kTiles;
    const auto num_tiles = static_cast<uint64_t>(layout().num_tiles());
    while ((self().acquire(tiles) >> WorkspaceLayout::kDone & WorkspaceLayout::kMask) < num_tiles) self().pause();
  }
  template <class Row>
  SPECMETA_HD Row* records_as() {
    static_assert(sizeof(Row) == WorkspaceLayout::kRecordWords * sizeof(uint64_t));
    return reinterpret_cast<Row*>(workspace() + WorkspaceLayout::kRecords);
  }

  // What comes before the algorithm.
  SPECMETA_HD void enter() {
    if (self().rank() == 0) {
      self().walk_state() = WalkState();
      self().grid_state() = GridState();
      if (places_all()) self().grid_state().block = self().index();
    }
    self().sync();
    if (!places_all()) draw(/*is_first=*/true);
  }
  SPECMETA_HD int32_t tile_index() { return self().grid_state().tile; }
  SPECMETA_HD void next_tile() { draw(/*is_first=*/false); }
  // What comes behind it: the last Cta leaves the workspace as it was. All that this one reads there, its threads have
  // read before next_tile() or finish_tiles().
  SPECMETA_HD void leave() {
    if (places_all()) return;
    bool is_last = false;
    if (self().rank() == 0) {
      const uint64_t others = self().add(workspace() + WorkspaceLayout::kCtasDone, 1);
      is_last = others + 1 == static_cast<uint64_t>(self().num_blocks());
    }
    if (!self().any(is_last)) return;
    self().sync();  // what the others have done is seen by all threads here
    SPECMETA_NO_UNROLL
    for (int64_t i = self().rank(); i < WorkspaceLayout::kHeader; i += self().size()) workspace()[i] = 0;
    uint64_t* const end = workspace() + rows_.workspace_words;
    SPECMETA_NO_UNROLL
    for (int64_t i = self().rank(); i < layout().num_chain_words(); i += self().size()) end[-1 - i] = 0;
  }

 private:
  SPECMETA_HD Self& self() { return static_cast<Self&>(*this); }
  SPECMETA_HD uint64_t* workspace() { return rows_.workspace + self().step() * rows_.workspace_words; }
  SPECMETA_HD bool is_last_thread() { return self().rank() == self().size() - 1; }
  SPECMETA_HD bool is_alone() { return self().num_blocks() == 1; }
  SPECMETA_HD WorkspaceLayout layout() { return WorkspaceLayout(rows_.batch, self().tile_rows()); }
  // Draws a tile; at first this Cta's number as well, later it gives back the last one, done. NOTE: both are kept in
  // shared memory, since registers are few.
  SPECMETA_HD void draw(bool is_first) {
    self().sync();  // grid_state() was read until here, and the records of the last tile are written
    if (self().rank() == 0) {
      const int field = is_first ? WorkspaceLayout::kBegun : WorkspaceLayout::kDone;
      const uint64_t drawn = self().add(workspace() + WorkspaceLayout::kTiles, uint64_t{1} << field | 1);
      if (is_first) self().grid_state().block = static_cast<int32_t>(drawn >> WorkspaceLayout::kBegun);
      self().grid_state().tile = static_cast<int32_t>(drawn & WorkspaceLayout::kMask);
    }
    self().sync();
  }
  SPECMETA_HD int64_t wait(const uint64_t* at) {
    uint64_t word;
    while ((word = self().peek(at)) == 0) self().pause();
    return static_cast<int64_t>(word - 1);
  }

  const Rows& rows_;
};

}  // namespace specmeta
