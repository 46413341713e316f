//! Where reservations are placed: every simulator of a process has arenas of its own, so that what one reserves
//! leaves the room behind another's alone.

use std::collections::BTreeMap;
use std::ops::Range as Span;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::space::{NoRange, Range, align_up};
use crate::state::Reservation;

/// Arenas for what is small, below `LARGE`.
const SMALL_ARENAS: u64 = 0x0100_0000_0000;
const SMALL_STEP: u64 = 32 << 30;
const LARGE: u64 = 8 << 30;
/// Where what is huge goes, whoever reserves it: there are not so many addresses that each could have an arena.
const HUGE_ARENA: Span<u64> = 0x0800_0000_0000..0x5000_0000_0000;
const HUGE: u64 = 64 << 30;
/// Arenas for what is between the two, and for what is small when the other is full.
const LARGE_ARENAS: u64 = 0x5800_0000_0000;
const LARGE_STEP: u64 = 128 << 30;
const ARENAS: usize = 224;
/// How many places that are not the simulator's own may turn out to be taken before the kernel chooses.
const ATTEMPTS: usize = 64;

/// Which arenas are some simulator's.
static TAKEN: [AtomicBool; ARENAS] = [const { AtomicBool::new(false) }; ARENAS];

/// A pair of arenas, nobody else's while this lives.
#[derive(Debug)]
struct Arena(usize);

impl Arena {
    /// One that is free, if any is.
    fn take() -> Option<Self> {
        TAKEN.iter().position(|taken| !taken.swap(true, Ordering::AcqRel)).map(Self)
    }

    fn span(&self, arenas: u64, step: u64) -> Span<u64> {
        let start = arenas + self.0 as u64 * step;
        start..start + step
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        TAKEN[self.0].store(false, Ordering::Release);
    }
}

/// Where a simulator looks for addresses next.
#[derive(Debug)]
pub(crate) struct Placer {
    /// None before something is placed, and where so many simulators live that the kernel chooses for this one.
    arena: Option<Arena>,
    small: u64,
    large: u64,
    huge: u64,
}

impl Placer {
    pub(crate) fn new() -> Self {
        Self { arena: None, small: 0, large: 0, huge: 0 }
    }

    /// Reserves `bytes` somewhere, aligned, beside the simulator's own `reservations`.
    ///
    /// Where the kernel chooses, the addresses are anybody's as soon as they are free again: a thread's stack may have
    /// them before they are asked for a second time. So it is asked for them last.
    pub(crate) fn place(
        &mut self,
        reservations: &BTreeMap<u64, Reservation>,
        bytes: u64,
        alignment: u64,
    ) -> Result<Range, NoRange> {
        if self.arena.is_none() {
            self.arena = Arena::take();
        }
        let arena = |arenas, step| self.arena.as_ref().map(|arena| arena.span(arenas, step));
        let small = (arena(SMALL_ARENAS, SMALL_STEP), &mut self.small);
        let large = (arena(LARGE_ARENAS, LARGE_STEP), &mut self.large);
        let spans = match bytes {
            ..LARGE => [Some(small), Some(large)],
            LARGE..HUGE => [Some(large), None],
            HUGE.. => [Some((Some(HUGE_ARENA), &mut self.huge)), None],
        };
        let look = |(span, cursor): (Option<Span<u64>>, _)| look(&span?, cursor, reservations, bytes, alignment);
        match spans.into_iter().flatten().find_map(look) {
            Some(range) => Ok(range),
            None => Range::anywhere(bytes, alignment),
        }
    }
}

/// Looks for a place behind the cursor, and from the start of the arena again.
fn look(
    span: &Span<u64>,
    cursor: &mut u64,
    reservations: &BTreeMap<u64, Reservation>,
    bytes: u64,
    alignment: u64,
) -> Option<Range> {
    let mut from = if span.contains(cursor) { *cursor } else { span.start };
    let mut again = from > span.start;
    let mut attempts = 0;
    while attempts < ATTEMPTS {
        let start = align_up(from, alignment)?;
        let Some(end) = start.checked_add(bytes).filter(|&end| end <= span.end) else {
            if !again {
                return None;
            }
            (from, again) = (span.start, false);
            continue;
        };
        let before = reservations.range(..end).next_back();
        if let Some(taken) = before.map(|(at, found)| at + found.bytes).filter(|&taken| taken > start) {
            from = taken;
            continue;
        }
        match Range::at(start, bytes) {
            Ok(range) => {
                *cursor = end;
                return Some(range);
            }
            Err(NoRange::Taken) => (from, attempts) = (end, attempts + 1),
            Err(NoRange::Exhausted) => return None,
        }
    }
    None
}
