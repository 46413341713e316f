//! Buffers of no chunk to thousands pass to an importer that may have few open files.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use cuvmm::{Limits, VirtualMemoryBuffer, VirtualMemoryResource, ipc};
use cuvmm_tests::{Backend, G, Peer, allow_open_files, open_files, require_marks, write_marks};
use nix::sys::resource::{Resource, setrlimit};

cuvmm_tests::suite!(any_number_of_chunks_passes_to_an_importer_of_64_open_files);

/// At and around what one message takes, and what a process may have open that set no limit of its own.
const COUNTS: [usize; 6] = [0, 1, 253, 254, 1_114, 5_000];

const FILES: usize = 64;
/// More than a transfer has open at once.
const AT_ONCE: usize = 40;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// A buffer of so many chunks of one granule.
fn chunks(resource: &VirtualMemoryResource, chunks: usize) -> VirtualMemoryBuffer {
    if chunks == 0 {
        return resource.allocate(0).unwrap();
    }
    let mut buffer = resource.allocate_with_capacity(G, chunks * G).unwrap();
    for size in (2..=chunks).map(|chunks| chunks * G) {
        buffer = buffer.grow_into(size).unwrap();
    }
    assert_eq!(buffer.chunks().len(), chunks);
    buffer
}

/// Lets this process have 64 open files in all, and tells which there are. A real driver has more than that open by
/// itself, and is left what a transfer needs.
fn limit_open_files(backend: &Backend) -> Vec<i32> {
    let files = open_files();
    let room = |limit: usize| limit - files.iter().filter(|file| (**file as usize) < limit).count();
    let limit = (FILES..).find(|limit| room(*limit) >= AT_ONCE).unwrap();
    assert!(backend.is_gpu() || limit == FILES, "{files:?}");
    setrlimit(Resource::RLIMIT_NOFILE, limit as u64, limit as u64).unwrap();
    files
}

fn any_number_of_chunks_passes_to_an_importer_of_64_open_files(backend: &Backend) {
    let resource = backend.shareable();
    if let Some((_, socket)) = Peer::role() {
        let first = resource.allocate(G).unwrap();
        ipc::import(&resource, ipc::export(&first).unwrap()).unwrap().close().unwrap();
        write_marks(&first, 0);
        first.close().unwrap();
        let files = limit_open_files(backend);
        for count in COUNTS {
            let buffer = ipc::receive_buffer(&socket, &resource, &Limits::default(), deadline()).unwrap();
            assert_eq!((buffer.chunks().len(), buffer.size()), (count, count * G));
            assert_eq!(open_files(), files, "open files after {count} chunks");
            require_marks(&buffer, 1, count * G);
            write_marks(&buffer, 2);
            buffer.close().unwrap();
            Peer::signal(&socket);
        }
        return;
    }
    // The simulator's memory takes a file for each chunk.
    allow_open_files();
    let peer = Peer::start(backend, "importer");
    for count in COUNTS {
        let buffer = chunks(&resource, count);
        write_marks(&buffer, 1);
        ipc::send_buffer(&peer.socket, &buffer, deadline()).unwrap();
        Peer::await_signal(&peer.socket);
        require_marks(&buffer, 2, count * G);
        buffer.close().unwrap();
    }
    peer.join();
}
