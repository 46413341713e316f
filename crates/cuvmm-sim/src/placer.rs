//! Where reservations are placed: every simulator of a process has arenas of its own, so that what one reserves
//! leaves the room behind another's alone.

use std::ops::Range as Span;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::space::{NoRange, Range, align_up};

/// Arenas for what is small, below `LARGE`.
const SMALL_ARENAS: u64 = 0x0100_0000_0000;
const SMALL_STEP: u64 = 32 << 30;
const LARGE: u64 = 8 << 30;
/// Where what is huge goes, whoever reserves it: there are not so many addresses that each could have an arena.
const HUGE_ARENA: Span<u64> = 0x0800_0000_0000..0x5000_0000_0000;
const HUGE: u64 = 64 << 30;
/// Arenas for what is between the two.
const LARGE_ARENAS: u64 = 0x5800_0000_0000;
const LARGE_STEP: u64 = 128 << 30;
const ARENAS: usize = 224;
/// How many places are tried before the kernel chooses.
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

    /// Reserves `bytes` somewhere, aligned.
    pub(crate) fn place(&mut self, bytes: u64, alignment: u64) -> Result<Range, NoRange> {
        if self.arena.is_none() {
            self.arena = Arena::take();
        }
        let arena = |arenas, step| self.arena.as_ref().map(|arena| arena.span(arenas, step));
        let (span, cursor) = match bytes {
            ..LARGE => (arena(SMALL_ARENAS, SMALL_STEP), &mut self.small),
            LARGE..HUGE => (arena(LARGE_ARENAS, LARGE_STEP), &mut self.large),
            HUGE.. => (Some(HUGE_ARENA), &mut self.huge),
        };
        match span.and_then(|span| look(&span, cursor, bytes, alignment)) {
            Some(range) => Ok(range),
            None => Range::anywhere(bytes, alignment),
        }
    }
}

/// Looks for a place behind the cursor, and from the start of the arena again.
fn look(span: &Span<u64>, cursor: &mut u64, bytes: u64, alignment: u64) -> Option<Range> {
    let mut from = if span.contains(cursor) { *cursor } else { span.start };
    let mut again = from > span.start;
    for _ in 0..ATTEMPTS {
        let start = align_up(from, alignment)?;
        match start.checked_add(bytes) {
            Some(end) if end <= span.end => match Range::at(start, bytes) {
                Ok(range) => {
                    *cursor = end;
                    return Some(range);
                }
                Err(NoRange::Taken) => from = end,
                Err(NoRange::Exhausted) => return None,
            },
            _ if again => (from, again) = (span.start, false),
            _ => return None,
        }
    }
    None
}
