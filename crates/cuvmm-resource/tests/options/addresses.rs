//! Where buffers lie: alignments and hints.

use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_driver::{CUresult, Call};
use cuvmm_handles::{Granularity, Reservation};
use cuvmm_resource::{Error, Options, Outcome, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine};

use crate::support::{Bench, R};

const MIB: usize = 1 << 20;

/// A reservation of 256 MiB at a multiple of as much.
fn reservation(bench: &Bench) -> Reservation {
    let size = Granularity::new(R).unwrap().exact(256 * MIB).unwrap();
    Reservation::reserve(&bench.driver, size, 256 * MIB).unwrap()
}

/// Addresses that nobody has.
fn vacant(bench: &Bench) -> CUdeviceptr {
    let reservation = reservation(bench);
    let address = reservation.address();
    reservation.close().unwrap();
    address
}

#[test]
fn every_allocation_is_aligned_wherever_it_comes_to_lie() {
    for machine in [Machine::h200(), Machine::h200_pair(), Machine::odd(), Machine::small()] {
        for hints in [Hints::Granted, Hints::Elsewhere, Hints::Refused(CUresult::INVALID_VALUE)] {
            let bench = Bench::new(machine.clone().hints(hints));
            let resource = bench.resource(Options::new().alignment(64 * MIB));
            let is_aligned = |address: CUdeviceptr| address.0.is_multiple_of((64 * MIB) as u64);
            let buffer = resource.allocate(1).unwrap();
            let roomy = resource.allocate_with_capacity(0, 96 * MIB).unwrap();
            let moved = buffer.grow(70 * MIB).unwrap();
            let again = buffer.grow(70 * MIB).unwrap();
            assert_eq!(again.outcome(), Some(Outcome::Moved), "the addresses behind are the first one's");
            for buffer in [&buffer, &roomy, &moved, &again] {
                assert!(is_aligned(buffer.address()), "{}", buffer.address());
            }
            drop((buffer, roomy, moved, again));
            bench.assert_clean();
        }
    }
}

#[test]
fn an_alignment_that_no_driver_has_fails_at_the_reservation() {
    let bench = Bench::small();
    let resource = bench.resource(Options::new().alignment(1 << 63));
    let error = resource.allocate(1).unwrap_err();
    assert_eq!(error.call(), Some(Call::cuMemAddressReserve));
    bench.assert_clean();
}

#[test]
fn a_hint_is_granted_where_the_addresses_are_free() {
    for machine in [Machine::h200(), Machine::odd(), Machine::small()] {
        let bench = Bench::new(machine.hints(Hints::Granted));
        let hint = vacant(&bench);
        let resource = bench.resource(Options::new().address_hint(hint).alignment(64 * MIB));
        for _ in 0..2 {
            let buffer = resource.allocate(MIB).unwrap();
            assert_eq!(buffer.address(), hint);
            let grown = buffer.grow(100 * MIB).unwrap();
            assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), hint));
        }
        let roomy = resource.allocate_with_capacity(0, 100 * MIB).unwrap();
        assert_eq!(roomy.address(), hint);
        // The addresses are its own now.
        let second = resource.allocate(MIB).unwrap();
        assert_ne!(second.address(), hint);
        drop((roomy, second));
        bench.assert_clean();
    }
}

#[test]
fn a_hint_that_is_not_granted_is_no_failure() {
    for hints in
        [Hints::Granted, Hints::Elsewhere, Hints::Refused(CUresult::INVALID_VALUE), Hints::Refused(CUresult(999))]
    {
        let bench = Bench::new(Machine::small().hints(hints));
        let occupied = reservation(&bench);
        // Free, taken, the last of a process, beyond any process, and the last there could be.
        let last = u64::MAX - u64::MAX % (64 * MIB) as u64;
        for hint in [vacant(&bench).0, occupied.address().0, (1 << 47) - (64 << 20), 1 << 60, last] {
            let options = Options::new().address_hint(CUdeviceptr(hint)).alignment(64 * MIB);
            let resource = bench.resource(options);
            let buffer = resource.allocate(MIB).unwrap();
            assert_eq!(buffer.address().0 % (64 * MIB) as u64, 0);
            assert_ne!(buffer.address(), occupied.address());
            buffer.grow_into(100 * MIB).unwrap().close().unwrap();
        }
        drop(occupied);
        bench.assert_clean();
    }
}

#[test]
fn a_hint_that_can_be_no_address_is_refused_before_any_call() {
    let bench = Bench::small();
    let refused = |options| VirtualMemoryResource::new(&bench.device(), options).map(drop).unwrap_err();
    for hint in [1, (R + R / 2) as u64, u64::MAX].map(CUdeviceptr) {
        assert_eq!(refused(Options::new().address_hint(hint)), Error::AddressHint { hint, alignment: R });
    }
    let hint = CUdeviceptr((96 * MIB) as u64);
    let unaligned = Options::new().address_hint(hint).alignment(64 * MIB);
    assert_eq!(refused(unaligned), Error::AddressHint { hint, alignment: 64 * MIB });
    bench.assert_no_call();
    // What it is to be a multiple of may also be the memory's granularity, which only a driver knows: then it is a wish.
    let bench = Bench::new(Machine::h200().granularity(|_, _| 32 << 20));
    let hint = CUdeviceptr(vacant(&bench).0 + (2 << 20));
    let buffer = bench.resource(Options::new().address_hint(hint)).allocate(1).unwrap();
    assert_eq!(buffer.address().0 % (32 << 20), 0);
}
