//! The main job: allocate, write, grow in place, grow by moving, share with a second process, verify every byte.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::{Duration, Instant};

use cuvmm::handles::Reservation;
use cuvmm::{Limits, Outcome, ipc};
use cuvmm_tests::{Backend, Peer, pattern};

const MIB: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

cuvmm_tests::suite!(two_processes_share_a_buffer_that_grew_both_ways);

fn two_processes_share_a_buffer_that_grew_both_ways(backend: &Backend) {
    if let Some((_, socket)) = Peer::role() {
        let resource = backend.shareable();
        let buffer = ipc::receive_buffer(&socket, &resource, &Limits::default(), Instant::now() + PATIENCE).unwrap();
        assert_eq!(buffer.chunks().len(), 3);
        let mut bytes = vec![0; buffer.size()];
        buffer.copy_to_host(0, &mut bytes).unwrap();
        assert!(bytes == pattern(1, bytes.len()), "not what was sent");
        buffer.copy_from_host(0, &pattern(2, bytes.len())).unwrap();
        buffer.close().unwrap();
        return;
    }
    let resource = backend.shareable();
    let bytes = pattern(1, 36 * MIB);
    let first = resource.allocate_with_capacity(2 * MIB, 4 * MIB).unwrap();
    first.copy_from_host(0, &bytes[..2 * MIB]).unwrap();

    let second = first.grow(4 * MIB).unwrap();
    assert_eq!((second.outcome(), second.address()), (Some(Outcome::InPlace), first.address()));
    second.copy_from_host(2 * MIB, &bytes[2 * MIB..4 * MIB]).unwrap();

    // Where the addresses behind are not to be had, somebody else has them already.
    let behind = second.address().checked_add(second.capacity()).unwrap();
    let occupied = Reservation::at(&backend.driver, Reservation::GRANULARITY.exact(32 * MIB).unwrap(), behind);
    let third = second.grow(36 * MIB).unwrap();
    assert_eq!(third.outcome(), Some(Outcome::Moved));
    assert_ne!(third.address(), first.address());
    third.copy_from_host(4 * MIB, &bytes[4 * MIB..]).unwrap();
    drop(occupied);

    let peer = Peer::start(backend, "importer");
    ipc::send_buffer(&peer.socket, &third, Instant::now() + PATIENCE).unwrap();
    peer.join();

    let theirs = pattern(2, third.size());
    let mut seen = vec![0; third.size()];
    third.copy_to_host(0, &mut seen).unwrap();
    assert!(seen == theirs, "not what the other process wrote");
    // The old addresses name the same bytes.
    first.copy_to_host(0, &mut seen[..2 * MIB]).unwrap();
    assert!(seen[..2 * MIB] == theirs[..2 * MIB]);
    for buffer in [third, first, second] {
        buffer.close().unwrap();
    }
}
