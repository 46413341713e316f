//! Bytes that are read as what the wire format has, as they are, and as changes of a header that is as it should be.
#![no_main]
#![allow(dead_code, reason = "each target uses its part of what they share")]

#[path = "../../crates/cuvmm-ipc/tests/support/hostile.rs"]
mod hostile;
#[path = "../../crates/cuvmm-ipc/tests/support/simulated.rs"]
mod simulated;
#[path = "../../crates/cuvmm-ipc/tests/support/mod.rs"]
mod support;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    hostile::read(bytes);
    hostile::read_changed(bytes);
});
