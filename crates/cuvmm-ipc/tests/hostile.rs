//! Peers that do anything: each program of theirs ends with a typed error or a whole buffer, leaves no file open and
//! nothing alive, and nothing of it reaches the driver unchecked. `cargo xtask fuzz` tries millions of them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/hostile.rs"]
mod hostile;
#[path = "support/simulated.rs"]
mod simulated;
mod support;

use cuvmm_driver::{CUresult, Call};
use cuvmm_ipc::Error;
use hostile::{Stage, What};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use support::OpenFiles;

const PROGRAMS: u32 = 3_000;

/// Tries many programs.
fn try_all(length: usize, attempt: impl Fn(&[u8])) {
    let config = Config { cases: PROGRAMS, failure_persistence: None, max_shrink_time: 30_000, ..Config::default() };
    let result = TestRunner::new(config).run(&prop::collection::vec(any::<u8>(), 0..length), |program| {
        attempt(&program);
        Ok(())
    });
    result.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn whatever_a_sender_does_leaves_nothing_at_the_receiver() {
    let files = OpenFiles::watch();
    let stage = Stage::new();
    try_all(120, |program| stage.receive(program));
    drop(stage);
    files.assert_unchanged();
}

#[test]
fn whatever_a_receiver_answers_leaves_nothing_at_the_sender() {
    let files = OpenFiles::watch();
    let stage = Stage::new();
    try_all(60, |program| stage.send(program));
    drop(stage);
    files.assert_unchanged();
}

#[test]
fn whatever_bytes_say_is_written_as_it_was_read() {
    try_all(200, hostile::read);
    try_all(40, hostile::read_changed);
}

/// In the batch that comes unasked, first and last, and in the next; as it comes, and when all is there.
#[test]
fn each_kind_of_file_in_each_place_is_told_apart() {
    let files = OpenFiles::watch();
    let stage = Stage::new();
    let kinds: Vec<What> = stage.files().collect();
    for place in [0, 15, 16, 19] {
        for (file, what) in kinds.iter().enumerate() {
            for at_once in [true, false] {
                let result = stage.receive_one_other(place, file, at_once);
                let call = |error: &Error| error.call();
                let is_expected = match (&result, what) {
                    // The others are of one granule too, or of more.
                    (Ok(()), What::Handle) => file == 0,
                    (Err(error), What::Handle) => file > 0 && call(error) == Some(Call::cuMemMap),
                    (Err(Error::OtherMemory { chunk, .. }), What::OtherMemory) => *chunk == place,
                    (Err(error), What::NoHandle) => error.code() == Some(CUresult::UNKNOWN),
                    (Err(Error::WrongFile { chunk, .. }), What::OtherFile) => *chunk == place,
                    _ => false,
                };
                assert!(is_expected, "{what:?}, file {file} as handle {place}: {result:?}");
            }
        }
    }
    drop(stage);
    files.assert_unchanged();
}

#[test]
fn a_fabric_handle_of_other_memory_and_one_of_none_are_told_apart() {
    let files = OpenFiles::watch();
    let stage = Stage::new();
    for (place, at_once) in [(0, true), (15, false), (16, true), (19, false)] {
        let result = |handle| stage.receive_one_other_fabric(place, handle, at_once);
        result(0).unwrap();
        assert_eq!(result(1).unwrap_err().call(), Some(Call::cuMemMap), "twice as much memory as was said");
        assert_eq!(result(9).unwrap_err().call(), Some(Call::cuMemImportFromShareableHandle), "no handle");
    }
    drop(stage);
    files.assert_unchanged();
}
