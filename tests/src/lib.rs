//! What the suites that cross the layers of cuvmm stand on: backends, second processes, patterns.
//!
//! A suite is written once, as functions of a [`Backend`], and included once for each backend by [`suite!`].
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod backend;
mod compare;
pub mod conformance;
mod foreign;
mod gone;
mod graph;
mod later;
mod machine;
pub mod matrix;
mod memory;
mod nothing;
mod own;
mod owner;
mod peer;
mod raw;
mod spin;
mod step;
mod watch;
mod work;

pub use backend::{Backend, Kind, Left, Mark};
pub use compare::{Times, benched_driver, compare, in_turn, is_gpu_benched};
pub use foreign::ForeignRange;
pub use gone::{Ranges, Remains};
pub use graph::{Executable, Graph, Kernels, await_graphs, queue_copy, retain_in_capture};
pub use later::{after, drain, until};
pub use machine::{Machine, driver_of, processors};
pub use memory::{
    G, MIB, ROOM, buffer_on, bytes_of, occupy_behind, pattern, require_marks, scratch, with_room_behind, write_marks,
};
pub use nothing::Nothing;
pub use own::{OPERATIONS, Prepare, Repeat};
pub use owner::Owner;
pub use peer::{Peer, allow_open_files, open_files};
pub use raw::{RawBuffer, synchronize};
pub use spin::Spin;
pub use step::{FAILING, FAILING_CODES, Step, steps};
pub use watch::Watched;
pub use work::{
    Capture, Current, Gate, MODES, Stream, hold_up, in_context_of, in_destructor, in_host_function, is_idle,
    queue_fill, queue_fill_at, read_at, wait_for, write_at,
};

/// Includes tests, functions of a `&Backend`, once for each backend: in `strict` and `measured`, which are the
/// simulator, and in `gpu`, whose tests `cargo test` leaves out and `cargo xtask gpu-test` runs.
#[macro_export]
macro_rules! suite {
    ($($name:ident),* $(,)?) => {
        $crate::suite!(@backend strict Strict: $($name)*);
        $crate::suite!(@backend measured Measured: $($name)*);
        $crate::suite!(@gpu gpu Gpu "needs a GPU: cargo xtask gpu-test": $($name)*);
    };
    (two gpus: $($name:ident),* $(,)?) => {
        $crate::suite!(@backend strict_x2 StrictPair: $($name)*);
        $crate::suite!(@backend measured_x2 MeasuredPair: $($name)*);
        $crate::suite!(@gpu gpu_x2 GpuPair "needs two GPUs: cargo xtask gpu-test": $($name)*);
    };
    (@backend $module:ident $kind:ident: $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $name() {
                    $crate::Backend::run($crate::Kind::$kind, concat!(stringify!($module), "::", stringify!($name)), super::$name);
                }
            )*
        }
    };
    (@gpu $module:ident $kind:ident $reason:literal: $($name:ident)*) => {
        mod $module {
            $(
                #[test]
                #[ignore = $reason]
                fn $name() {
                    $crate::Backend::run($crate::Kind::$kind, concat!(stringify!($module), "::", stringify!($name)), super::$name);
                }
            )*
        }
    };
}

/// The code of the README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// And that of the page on sharing.
#[cfg(doctest)]
#[doc = include_str!("../../docs/sharing.md")]
struct Sharing;
