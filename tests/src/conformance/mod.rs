//! The conformance suite: questions in text files, asked of simulators and of a GPU alike.
//!
//! A check is some lines of calls with the answers that a driver gives. `tests/conformance/README.md` has the format.

mod commands;
mod parse;
mod part;
mod report;
mod run;
mod scene;
mod value;

pub use parse::{Check, Line, Need, Section, sections};
pub use part::play_part;
pub use report::{AllAnswers, Answers, REPORT, expected_cell, not_asked_cell, rows, write_report};
pub use run::{Answer, Asked, Driver, ask, ask_all, can_ask, difference, equals};

/// Calls `$callback!` with the names of the sections: the files of `tests/conformance`, without their ending.
#[macro_export]
macro_rules! for_each_section {
    ($callback:ident) => {
        $callback! {
            init
            reserve
            free
            create
            map
            unmap
            access
            handles
            share
            processes
            accounting
            host
            pointers
            copies
            kernels
            order
            streams
            events
            capture
            graphs
            user_objects
            callbacks
            contexts
            fabric
            peers
            threads
            limits
        }
    };
}
