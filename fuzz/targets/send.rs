//! Receivers that answer anything, and a sender of a buffer of a simulated device.
#![no_main]
#![allow(dead_code, reason = "each target uses its part of what they share")]

#[path = "../../crates/cuvmm-ipc/tests/support/hostile.rs"]
mod hostile;
#[path = "../../crates/cuvmm-ipc/tests/support/simulated.rs"]
mod simulated;
#[path = "../../crates/cuvmm-ipc/tests/support/mod.rs"]
mod support;

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;

static STAGE: LazyLock<hostile::Stage> = LazyLock::new(hostile::Stage::new);

fuzz_target!(|program: &[u8]| STAGE.send(program));
