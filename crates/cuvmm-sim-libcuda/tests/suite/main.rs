//! What must hold for programs that load the library: it is found by our own loader and by any other, keeps to its
//! environment, and shares memory with other processes that loaded it.
#![allow(clippy::unwrap_used, clippy::panic, clippy::multiple_unsafe_ops_per_block, reason = "tests")]

mod bindings;
mod environment;
mod processes;
mod round_trip;
mod stand_in;
mod symbols;
