//! Does each operation on a driver whose calls do nothing, for callgrind to count its instructions:
//! `cargo xtask instructions` runs it so. By itself it says nothing.
//!
//! Before each count it prints what is counted; what callgrind writes after each is in the same order. The heap is one that
//! takes a few instructions, always the same: what the system's takes depends on all that was done before.
//!
//! # Safety
//! One function has a name that no compiler changes, which is nobody else's. The heap gives out each byte once.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the program is its own")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;

use cuvmm_tests::OPERATIONS;

/// How many chunks a buffer has. Of 10,000 the operations are counted whose cost does not follow that number.
const CHUNKS: [usize; 3] = [1, 100, 10_000];
const FLAT: [&str; 5] = ["allocate", "grow-in-place", "grow-behind", "grow-into", "covered"];
/// How often each is counted: the middle one is what it takes.
const TIMES: usize = 5;

/// What the heap has of the system's at a time.
const BLOCK: usize = 16 << 20;

/// Gives out what is behind the last, and takes nothing back.
struct Ahead;

thread_local! {
    /// What is left of a block: where that begins, and how much it is.
    static LEFT: Cell<(*mut u8, usize)> = const { Cell::new((ptr::null_mut(), 0)) };
}

// SAFETY: what is given out lies in a block of the system's, which this thread alone has, and behind what was given out before.
unsafe impl GlobalAlloc for Ahead {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let (mut start, mut left) = LEFT.get();
        let mut taken = start.align_offset(layout.align()).saturating_add(layout.size());
        if taken > left {
            left = BLOCK.max(layout.size());
            let Ok(block) = Layout::from_size_align(left, layout.align().max(16)) else { return ptr::null_mut() };
            // SAFETY: it has a size.
            start = unsafe { System.alloc(block) };
            taken = layout.size();
            if start.is_null() {
                return start;
            }
        }
        // SAFETY: so much is left of the block.
        let end = unsafe { start.add(taken) };
        LEFT.set((end, left - taken));
        // SAFETY: it was counted in what was taken.
        unsafe { end.sub(layout.size()) }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static HEAP: Ahead = Ahead;

fn main() {
    for (name, prepare) in OPERATIONS {
        for chunks in CHUNKS {
            if chunks > 100 && !FLAT.contains(&name) {
                continue;
            }
            let mut repeat = prepare(chunks);
            // What is done the first time alone is not its cost.
            repeat(&mut |operation| operation());
            for _ in 0..TIMES {
                println!("own/{name}/{chunks}");
                repeat(&mut counted_by_callgrind);
            }
        }
    }
}

/// Callgrind knows it by its name.
#[inline(never)]
// SAFETY: nothing else has that name.
#[unsafe(no_mangle)]
fn counted_by_callgrind(operation: &mut dyn FnMut()) {
    operation();
    std::hint::black_box(());
}
