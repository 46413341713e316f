//! The main job: allocate, write, grow in place, grow by moving, share with a second process, verify every byte.

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
        assert_eq!(bytes, pattern(1, bytes.len()));
        buffer.copy_from_host(0, &pattern(2, bytes.len())).unwrap();
        buffer.close().unwrap();
        return;
    }
    let resource = backend.shareable();
    let first = resource.allocate_with_capacity(2 * MIB, 4 * MIB).unwrap();
    let bytes = pattern(1, 8 * MIB);
    first.copy_from_host(0, &bytes[..2 * MIB]).unwrap();

    let second = first.grow(4 * MIB).unwrap();
    assert_eq!((second.outcome(), second.address()), (Some(Outcome::InPlace), first.address()));
    second.copy_from_host(2 * MIB, &bytes[2 * MIB..4 * MIB]).unwrap();

    let behind = second.address().checked_add(second.size()).unwrap();
    let unit = Reservation::GRANULARITY.round_up(1).unwrap();
    let occupied = Reservation::at(&backend.driver, unit, behind);
    let third = second.grow(8 * MIB).unwrap();
    assert_eq!(third.outcome(), Some(Outcome::Moved));
    assert_ne!(third.address(), first.address());
    third.copy_from_host(4 * MIB, &bytes[4 * MIB..]).unwrap();
    drop(occupied);

    let peer = Peer::start(backend, "importer");
    ipc::send_buffer(&peer.socket, &third, Instant::now() + PATIENCE).unwrap();
    peer.join();

    let mut seen = vec![0; third.size()];
    third.copy_to_host(0, &mut seen).unwrap();
    assert_eq!(seen, pattern(2, seen.len()));
    // The old addresses name the same bytes.
    first.copy_to_host(0, &mut seen[..2 * MIB]).unwrap();
    assert_eq!(seen[..2 * MIB], pattern(2, 8 * MIB)[..2 * MIB]);
    for buffer in [third, first, second] {
        buffer.close().unwrap();
    }
}
