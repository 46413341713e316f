//! Does each operation on a driver whose calls do nothing, for callgrind to count its instructions:
//! `cargo xtask instructions` runs it so. By itself it says nothing.
//!
//! Before each count it prints what is counted; what callgrind writes after each is in the same order.
//!
//! # Safety
//! One function has a name that no compiler changes, which is nobody else's.
#![allow(unsafe_code)]
#![allow(missing_docs, reason = "the program is its own")]

use cuvmm_tests::OPERATIONS;

/// How many chunks a buffer has. Of 10,000 the operations are counted whose cost does not follow that number.
const CHUNKS: [usize; 3] = [1, 100, 10_000];
const FLAT: [&str; 4] = ["allocate", "grow-in-place", "grow-behind", "covered"];
/// How often each is counted: a tree of rooms splits its nodes now and then.
const TIMES: usize = 5;

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
