//! Grows with options of their own: in place, zeroed, and with chunks of another resource.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::{CUdevice_attribute, CUmemAllocationGranularity_flags};
use cuvmm_resource::{
    Access, Error, GranularityKind, GrowOptions, HandleKind, Location, Options, Outcome, Request, VirtualMemoryResource,
};
use cuvmm_sim::{Hints, Machine};

use crate::support::{Bench, G};

const MIB: usize = 1 << 20;

#[test]
fn a_chunk_has_the_options_of_the_resource_that_made_it_and_no_other_chunk_has() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::h200_pair().hints(hints));
        let peer = bench.driver.device(1).unwrap();
        let (plain, special) = (
            bench.plain(),
            bench.resource(Options::new().peer(&peer, Access::Read).rdma(Request::Required).max_chunk(22 * MIB)),
        );
        let buffer = plain.allocate(MIB).unwrap();
        let grown = buffer.grow_with(42 * MIB, &GrowOptions::new().chunk_of(&special)).unwrap();
        let expected = if hints == Hints::Granted { Outcome::InPlace } else { Outcome::Moved };
        assert_eq!((grown.outcome(), grown.resource()), (Some(expected), &plain));
        let again = grown.grow_into(100 * MIB).unwrap();
        let told = |chunk: &cuvmm_resource::Chunk| (chunk.size / MIB, chunk.access.len(), chunk.rdma);
        let chunks: Vec<_> = again.chunks().iter().map(told).collect();
        // Where it grew in place, the last one lies on both sides of a border of reservations.
        let added: usize = chunks[1..].iter().filter(|(_, _, rdma)| *rdma).map(|(size, ..)| size).sum();
        assert_eq!((chunks[0], added), ((2, 1, false), 40));
        assert!(
            chunks[1..].iter().all(|(size, grants, rdma)| *grants == 1 + usize::from(*rdma) && (!rdma || *size <= 22))
        );
        // The next ones are as they were.
        assert_eq!(plain.allocate(1).unwrap().chunks()[0].access.len(), 1);
        assert!(plain.options().peers.is_empty() && !plain.has_rdma() && special.has_rdma());
        drop((buffer, again));
        bench.assert_clean();
    }
}

#[test]
fn a_chunk_of_another_kind_is_refused_before_any_call() {
    let bench = Bench::new(Machine::h200_pair());
    let other = Bench::new(Machine::h200_pair());
    let theirs = |device: &cuvmm_driver::Device, options| VirtualMemoryResource::new(device, options).unwrap();
    let resource = bench.plain();
    let buffer = resource.allocate(MIB).unwrap();
    let own = bench.device();
    for (added, what) in [
        (theirs(&bench.driver.device(1).unwrap(), Options::new()), "device"),
        (theirs(&other.device(), Options::new()), "device"),
        (theirs(&own, Options::new().location(Location::Host)), "location"),
        (theirs(&own, Options::new().location(Location::HostNuma(0))), "location"),
        (theirs(&own, Options::new().handle_kind(HandleKind::PosixFd)), "handle kind"),
    ] {
        bench.simulator.clear_calls();
        other.simulator.clear_calls();
        let options = GrowOptions::new().chunk_of(&added);
        // Also where nothing would have been added.
        for size in [1, 40 * MIB, usize::MAX] {
            assert_eq!(buffer.grow_with(size, &options).map(drop), Err(Error::ChunkMismatch { what }));
        }
        bench.assert_no_call();
        other.assert_no_call();
    }
    // The kind that counts is the one obtained.
    let made_do = Options::new().handle_kind_or(HandleKind::Fabric, HandleKind::None);
    let options = GrowOptions::new().chunk_of(&theirs(&own, made_do)).chunk_of(&resource);
    let (error, buffer) = match buffer.grow_into_with(1 << 40, &options).map_err(|error| error.into_parts()) {
        Ok(_) => panic!("so much memory"),
        Err(parts) => parts,
    };
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    buffer.grow_into_with(4 * MIB, &options).unwrap().close().unwrap();
    bench.assert_clean();
}

#[test]
fn a_chunk_of_a_coarser_granularity_begins_and_ends_at_its_multiples() {
    let bench = Bench::new(Machine::odd());
    let coarse = bench.resource(Options::new().granularity(GranularityKind::Recommended));
    let options = GrowOptions::new().chunk_of(&coarse);
    let buffer = bench.plain().allocate(2 * MIB).unwrap();
    let grown = buffer.grow_with(3 * MIB, &options).unwrap();
    assert_eq!((grown.size(), grown.chunks()[1].size), (4 * MIB, 2 * MIB));
    let odd = bench.plain().allocate(MIB).unwrap();
    bench.simulator.clear_calls();
    let not_granular = cuvmm_handles::Error::NotGranular { bytes: MIB, granularity: 2 * MIB };
    assert_eq!(odd.grow_with(3 * MIB, &options).map(drop), Err(Error::Handles(not_granular)));
    bench.assert_no_call();
    drop((buffer, grown, odd));
    bench.assert_clean();
}

#[test]
fn a_chunk_of_a_coarser_granularity_is_moved_to_its_multiples() {
    let granularity = |_: &_, option| {
        if option == CUmemAllocationGranularity_flags::RECOMMENDED { 64 * MIB } else { 2 * MIB }
    };
    let bench = Bench::new(Machine::h200().granularity(granularity).hints(Hints::Refused(CUresult::INVALID_VALUE)));
    let coarse = bench.resource(Options::new().granularity(GranularityKind::Recommended));
    let buffer = bench.plain().allocate(64 * MIB).unwrap();
    let mixed = buffer.grow_with(65 * MIB, &GrowOptions::new().chunk_of(&coarse)).unwrap();
    assert_eq!(mixed.size(), 128 * MIB);
    // Reservations one beside the other, of which not each begins at a multiple by itself.
    let moved: Vec<_> = (0..4).map(|_| mixed.grow(160 * MIB).unwrap()).collect();
    for buffer in &moved {
        assert_eq!(buffer.outcome(), Some(Outcome::Moved));
        assert!(buffer.chunks()[1].address.0.is_multiple_of(64 * MIB as u64), "{buffer:?}");
    }
    drop((buffer, mixed, moved));
    bench.assert_clean();
}

#[test]
fn a_grow_that_must_stay_fails_rather_than_move() {
    let bench = Bench::new(Machine::small().hints(Hints::Elsewhere));
    let buffer = bench.plain().allocate(G).unwrap();
    let capacity = buffer.capacity();
    let before = bench.simulator.live();
    let stay = GrowOptions::new().in_place();
    let would_move = Error::WouldMove { size: capacity + G, capacity };
    assert_eq!(buffer.grow_with(capacity + 1, &stay).map(drop), Err(would_move.clone()));
    let (error, buffer) = buffer.grow_into_with(capacity + 1, &stay).unwrap_err().into_parts();
    assert_eq!((error, bench.simulator.live()), (would_move, before));
    let grown = buffer.grow_into_with(capacity, &stay).unwrap();
    assert_eq!(grown.outcome(), Some(Outcome::InPlace));
    // A buffer without any addresses has none to stay at.
    let empty = bench.plain().allocate(0).unwrap();
    assert!(matches!(empty.grow_with(1, &stay), Err(Error::WouldMove { capacity: 0, .. })));
    drop((grown, empty));
    bench.assert_clean();
}

#[test]
fn zeros_are_what_is_added_and_no_more() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let special = bench.resource(Options::new().max_chunk(3 * G));
        let buffer = bench.plain().allocate(5 * G).unwrap();
        buffer.fill(0, 5 * G, 0x11).unwrap();
        let options = GrowOptions::new().zeroed().chunk_of(&special);
        let grown = buffer.grow_with(600 * G + 1, &options).unwrap();
        let bytes = bench.bytes_of(&grown);
        assert_eq!(bytes.len(), 601 * G);
        assert!(bytes[..5 * G].iter().all(|byte| *byte == 0x11));
        assert!(bytes[5 * G..].iter().all(|byte| *byte == 0));
        drop((buffer, grown, special));
        bench.assert_clean();
    }
    // Who may not write can't zero: neither what the buffer's resource grants, nor another's.
    let bench = Bench::new(Machine::small());
    let silent = bench.resource(Options::new().own_access(Access::Read));
    let buffer = bench.plain().allocate(G).unwrap();
    bench.simulator.clear_calls();
    let options = GrowOptions::new().zeroed();
    assert_eq!(buffer.grow_with(2 * G, &options.clone().chunk_of(&silent)).map(drop), Err(Error::NotWritable));
    bench.assert_no_call();
    let theirs = silent.allocate(G).unwrap();
    assert_eq!(theirs.grow_with(2 * G, &options).map(drop), Err(Error::NotWritable));
    let grown = theirs.grow_with(2 * G, &options.chunk_of(&bench.plain())).unwrap();
    assert!(bench.bytes_of(&grown)[G..].iter().all(|byte| *byte == 0));
}

#[test]
fn what_options_were_given_never_changes() {
    let mut machine = Machine::h200_pair();
    machine.devices[0].attributes.insert(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED.0, 0);
    let bench = Bench::new(machine);
    let peer = bench.driver.device(1).unwrap();
    let options = Options::new().peer(&peer, Access::Read).handle_kind_or(HandleKind::Fabric, HandleKind::PosixFd);
    let resource = bench.resource(options.clone());
    let told = format!("{:?}", resource.options());
    assert_eq!(told, format!("{options:?}"));
    let buffer = resource.allocate(MIB).unwrap();
    // Of the copy that is changed nothing comes back.
    let changed = resource.options().clone().peer(&peer, Access::None).alignment(1 << 30);
    drop(bench.resource(changed).allocate(MIB).unwrap());
    let larger = buffer.grow_into_with(40 * MIB, &GrowOptions::new().zeroed().chunk_of(&resource)).unwrap();
    assert_eq!(format!("{:?}", resource.options()), told);
    assert!(larger.chunks().iter().all(|chunk| chunk.access.len() == 2));
    drop((larger, resource));
    bench.assert_clean();
}
