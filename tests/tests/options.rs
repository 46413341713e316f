//! Every option of a resource, with an allocation made by it: what was asked for is what the driver says there is.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUmemAccess_flags, CUmemAllocationProp, CUmemLocation, CUmemLocationType};
use cuvmm::ipc::{export, import};
use cuvmm::resource::Error;
use cuvmm::{
    Access, CUresult, Call, GranularityKind, GrowOptions, GrowthPolicy, HandleKind, Location, Options, Outcome,
    Request, VirtualMemoryBuffer,
};
use cuvmm_tests::{
    Backend, Current, G, MIB, ROOM, Stream, occupy_behind, pattern, read_at, require_marks, steps, with_room_behind,
    write_at, write_marks,
};

cuvmm_tests::suite!(
    memory_of_the_host_is_where_it_was_asked_for,
    memory_of_the_host_grows_without_any_context,
    memory_of_the_host_is_shared_by_its_node,
    a_handle_kind_is_the_one_that_the_machine_gives,
    the_recommended_granularity_rounds_sizes,
    a_hint_is_granted_where_the_addresses_are_free,
    access_for_nobody_makes_no_call_and_reaches_nothing,
    access_to_read_lets_the_device_read_and_not_write,
    features_are_what_the_driver_says_of_the_memory,
    a_bound_on_chunks_makes_several,
    a_growth_policy_adds_more_than_is_asked_for,
    a_hook_is_called_once_where_memory_is_short,
    another_try_is_made_as_often_as_was_asked_for,
    a_chunk_of_another_resource_keeps_its_access_wherever_it_moves,
);

cuvmm_tests::suite!(
    two gpus:
    a_peer_has_the_access_that_it_was_given_through_every_grow,
    a_peer_alone_reaches_memory_that_its_own_device_does_not,
);

/// What the driver says that the buffer's first chunk was made as.
fn made_as(buffer: &VirtualMemoryBuffer) -> CUmemAllocationProp {
    buffer.mappings()[0].allocation().properties().unwrap()
}

/// What the driver says that a device may do with each chunk.
fn access_of(backend: &Backend, ordinal: i32, buffer: &VirtualMemoryBuffer) -> Vec<CUmemAccess_flags> {
    let ask = |address| backend.driver.mem_get_access(CUmemLocation::device(ordinal), address).unwrap();
    buffer.chunks().iter().map(|chunk| ask(chunk.address)).collect()
}

fn memory_of_the_host_is_where_it_was_asked_for(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    for location in [Location::Host, Location::HostNuma(0), Location::HostNumaCurrent] {
        let resource = backend.resource_with(Options::new().location(location));
        assert!(resource.is_host_accessible() && resource.is_device_accessible() && !resource.is_managed());
        assert_eq!((resource.device_id(), resource.device()), (None, &backend.device));
        // The current node has a number from then on.
        assert!(matches!(resource.location(), Location::Host | Location::HostNuma(0..)), "{location:?}");
        let buffer = resource.allocate(G).unwrap();
        let made = made_as(&buffer).location;
        match resource.location() {
            Location::HostNuma(node) => assert_eq!(made, CUmemLocation::host_numa(node)),
            _ => assert_ne!(made.location_type, CUmemLocationType::DEVICE),
        }
        assert_eq!(access_of(backend, 0, &buffer), [CUmemAccess_flags::READWRITE]);
        write_marks(&buffer, 1);
        let grown = buffer.grow(3 * G).unwrap();
        require_marks(&grown, 1, G);
        // What the device writes the host reads.
        grown.fill_on(&stream, G, G, 0x5a).unwrap();
        let mut seen = [0; 64];
        grown.copy_to_host(2 * G - 64, &mut seen).unwrap();
        assert_eq!(seen, [0x5a; 64]);
        buffer.close().unwrap();
        grown.close().unwrap();
    }
    backend.require_all_gone();
}

fn memory_of_the_host_grows_without_any_context(backend: &Backend) {
    let own = [Access::ReadWrite, Access::None];
    for (location, own) in [Location::Host, Location::HostNuma(0)].into_iter().flat_map(|at| own.map(|own| (at, own))) {
        let resource = backend.resource_with(Options::new().location(location).own_access(own));
        assert_eq!(resource.is_device_accessible(), own == Access::ReadWrite);
        let buffer = resource.allocate(G).unwrap();
        let in_place = buffer.grow(2 * G).unwrap();
        let moved = buffer.grow(2 * G).unwrap();
        assert_eq!((in_place.outcome(), moved.outcome()), (Some(Outcome::InPlace), Some(Outcome::Moved)));
        write_marks(&in_place, 3);
        require_marks(&moved, 3, G);
        buffer.close().unwrap();
        let zeroed = moved.grow_with(3 * G, &GrowOptions::new().zeroed()).unwrap();
        require_marks(&zeroed, 3, G);
        let mut seen = [1; 64];
        zeroed.copy_to_host(3 * G - 64, &mut seen).unwrap();
        assert_eq!(seen, [0; 64]);
        zeroed.close().unwrap();
        moved.truncate_into(G).unwrap().close().unwrap();
        drop(in_place);
    }
    assert_eq!(backend.ledger.count(Call::cuDevicePrimaryCtxRetain), 0);
    assert!(backend.driver.ctx_get_current().unwrap().is_null());
    backend.require_all_gone();
}

fn memory_of_the_host_is_shared_by_its_node(backend: &Backend) {
    let options = Options::new().location(Location::HostNuma(0)).handle_kind(HandleKind::PosixFd);
    let resource = backend.resource_with(options);
    let buffer = resource.allocate(2 * G).unwrap();
    write_marks(&buffer, 4);
    let alias = import(&resource, export(&buffer).unwrap()).unwrap();
    require_marks(&alias, 4, 2 * G);
    alias.close().unwrap();
    buffer.close().unwrap();
    // What has no node has no handle: refused before any call.
    let options = Options::new().location(Location::Host).handle_kind(HandleKind::PosixFd);
    let refused = backend.require_no_call(|| cuvmm::VirtualMemoryResource::new(&backend.device, options).unwrap_err());
    assert_eq!(refused, Error::HandleKindOfHost { kind: HandleKind::PosixFd });
    backend.require_all_gone();
}

fn a_handle_kind_is_the_one_that_the_machine_gives(backend: &Backend) {
    let both = HandleKind::PosixFdAndFabric;
    let probe = backend.device.probe(both.as_driver());
    let resource = backend.resource_with(Options::new().handle_kind_or(both, HandleKind::PosixFd));
    let expected = if probe.is_available() { both } else { HandleKind::PosixFd };
    assert_eq!(resource.handle_kind(), expected);
    assert_eq!(resource.handle_refused().is_some(), !probe.is_available());
    assert!(resource.is_ipc_enabled());
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    let made = buffer.chunks().iter().map(|chunk| chunk.handle_kinds).collect::<Vec<_>>();
    assert_eq!(made, [expected.as_driver(); 2]);
    assert_eq!(made_as(&buffer).requested_handle_types, expected.as_driver());
    write_marks(&buffer, 5);
    let alias = import(&resource, export(&buffer).unwrap()).unwrap();
    require_marks(&alias, 5, 2 * G);
    alias.close().unwrap();
    buffer.close().unwrap();
    assert!(!backend.resource().is_ipc_enabled());
    backend.require_all_gone();
}

fn the_recommended_granularity_rounds_sizes(backend: &Backend) {
    let resource = backend.resource_with(Options::new().granularity(GranularityKind::Recommended));
    let granularity = resource.granularity().bytes();
    assert!(granularity >= backend.resource().granularity().bytes());
    let buffer = resource.allocate(granularity + 1).unwrap();
    assert_eq!(buffer.size(), 2 * granularity);
    let grown = buffer.grow_into(2 * granularity + 1).unwrap();
    assert_eq!(grown.size(), 3 * granularity);
    grown.close().unwrap();
    backend.require_all_gone();
}

fn a_hint_is_granted_where_the_addresses_are_free(backend: &Backend) {
    let first = with_room_behind(&backend.resource(), ROOM);
    let hint = first.address().checked_add(ROOM).unwrap();
    let resource = backend.resource_with(Options::new().address_hint(hint));
    let wished = resource.allocate(G).unwrap();
    assert_eq!(wished.address(), hint);
    // The addresses are taken by now.
    let elsewhere = resource.allocate(G).unwrap();
    assert_ne!(elsewhere.address(), hint);
    for buffer in [first, wished, elsewhere] {
        write_marks(&buffer, 6);
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

fn access_for_nobody_makes_no_call_and_reaches_nothing(backend: &Backend) {
    let resource = backend.resource_with(Options::new().own_access(Access::None));
    assert!(!resource.is_device_accessible() && !resource.is_host_accessible());
    let (calls, buffer) = steps(backend, || resource.allocate(G).unwrap().grow_into(2 * G).unwrap());
    assert!(calls.iter().all(|step| step.call != Call::cuMemSetAccess), "{calls:?}");
    assert!(buffer.chunks().iter().all(|chunk| chunk.access.is_empty()));
    assert_eq!(access_of(backend, 0, &buffer), [CUmemAccess_flags::NONE; 2]);
    let stream = Stream::non_blocking(&backend.device);
    assert_eq!(write_at(&stream, buffer.address(), &[1]).unwrap_err().code(), Some(CUresult::INVALID_VALUE));
    // Nor does it where it moves.
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(access_of(backend, 0, &moved), [CUmemAccess_flags::NONE; 3]);
    let zeroed = backend.require_no_call(|| resource.allocate_zeroed(G).unwrap_err());
    assert_eq!(zeroed, Error::NotWritable);
    buffer.close().unwrap();
    moved.close().unwrap();
    backend.require_all_gone();
}

fn access_to_read_lets_the_device_read_and_not_write(backend: &Backend) {
    let writable = backend.resource();
    let readable = backend.resource_with(Options::new().own_access(Access::Read));
    let buffer = readable.allocate(G).unwrap();
    assert_eq!(access_of(backend, 0, &buffer), [CUmemAccess_flags::READ]);
    let stream = Stream::non_blocking(&backend.device);
    assert_eq!(write_at(&stream, buffer.address(), &[1]).unwrap_err().code(), Some(CUresult::INVALID_VALUE));
    assert_eq!(read_at(&stream, buffer.address(), 16).unwrap().len(), 16);
    // A buffer that can be written grows by a chunk that can't.
    let mixed = writable.allocate(G).unwrap();
    let mixed = mixed.grow_into_with(2 * G, &GrowOptions::new().chunk_of(&readable)).unwrap();
    mixed.copy_from_host(0, &pattern(1, 5000)).unwrap();
    let refused = backend.require_no_call(|| mixed.copy_from_host(G - 1, &[1; 2]));
    assert_eq!(refused, Err(Error::NotAccessible { needed: Access::ReadWrite }));
    buffer.close().unwrap();
    mixed.close().unwrap();
    backend.require_all_gone();
}

fn features_are_what_the_driver_says_of_the_memory(backend: &Backend) {
    for request in [Request::Off, Request::IfSupported, Request::Required] {
        let is_wanted = request != Request::Off;
        let resource = backend.resource_with(Options::new().rdma(request));
        let buffer = resource.allocate(G).unwrap();
        assert_eq!(made_as(&buffer).alloc_flags.gpu_direct_rdma_capable != 0, resource.has_rdma());
        assert_eq!((resource.has_rdma(), resource.has_compression()), (is_wanted, false), "{request:?}");
        buffer.close().unwrap();
        let resource = backend.resource_with(Options::new().compression(request));
        let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
        assert_eq!(made_as(&buffer).alloc_flags.compression_type != 0, resource.has_compression());
        assert_eq!((resource.has_rdma(), resource.has_compression()), (false, is_wanted), "{request:?}");
        write_marks(&buffer, 7);
        require_marks(&buffer, 7, 2 * G);
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

fn a_bound_on_chunks_makes_several(backend: &Backend) {
    let resource = backend.resource_with(Options::new().max_chunk(2 * G + 1));
    let sizes =
        |buffer: &VirtualMemoryBuffer| buffer.chunks().iter().map(|chunk| chunk.size / G).collect::<Vec<usize>>();
    let buffer = resource.allocate(5 * G).unwrap();
    assert_eq!(sizes(&buffer), [2, 2, 1]);
    write_marks(&buffer, 8);
    let grown = buffer.grow(10 * G).unwrap();
    assert_eq!(sizes(&grown), [2, 2, 1, 2, 2, 1]);
    require_marks(&grown, 8, 5 * G);
    let shorter = grown.truncate(4 * G).unwrap();
    assert_eq!(sizes(&shorter), [2, 2]);
    for buffer in [buffer, grown, shorter] {
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

fn a_growth_policy_adds_more_than_is_asked_for(backend: &Backend) {
    let policies = [
        (GrowthPolicy::Exact, 31),
        (GrowthPolicy::Step(8 * G), 4),
        (GrowthPolicy::doubling(), 5),
        (GrowthPolicy::Geometric { percent: 50, floor: 4 * G, cap: 8 * G }, 6),
    ];
    for (policy, grows) in policies {
        let resource = backend.resource_with(Options::new().growth(policy));
        let mut buffer = resource.allocate_with_capacity(G, 64 * G).unwrap();
        let creates = backend.ledger.count(Call::cuMemCreate);
        for granules in 2..=32 {
            buffer = buffer.grow_into(granules * G).unwrap();
            assert_eq!(buffer.size(), granules * G);
        }
        assert_eq!(backend.ledger.count(Call::cuMemCreate) - creates, grows, "{policy:?}");
        buffer.copy_from_host(32 * G - 1, &[1]).unwrap();
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

/// More memory than any device has.
const TOO_MUCH: usize = 1 << 45;

fn a_hook_is_called_once_where_memory_is_short(backend: &Backend) {
    let calls = Arc::new(AtomicUsize::new(0));
    for says in [true, false] {
        let (counted, creates) = (Arc::clone(&calls), backend.ledger.count(Call::cuMemCreate));
        let options = Options::new().on_out_of_memory(move |shortage| {
            assert_eq!((shortage.requested, shortage.granularity), (TOO_MUCH, G));
            counted.fetch_add(1, Ordering::Relaxed);
            says
        });
        let error = backend.resource_with(options).allocate(TOO_MUCH).unwrap_err();
        assert!(matches!(&error, Error::OutOfMemory(shortage) if shortage.memory.is_none()), "{error}");
        assert_eq!(calls.swap(0, Ordering::Relaxed), 1);
        assert_eq!(backend.ledger.count(Call::cuMemCreate) - creates, 1 + usize::from(says));
    }
    // Where a context is active it is said how much there is.
    let current = Current::push(&backend.device);
    let error = backend.resource().allocate(TOO_MUCH).unwrap_err();
    let Error::OutOfMemory(shortage) = error else { panic!("{error}") };
    let memory = shortage.memory.expect("how much there is");
    assert!(memory.free <= memory.total && memory.total <= backend.device.total_memory().unwrap());
    drop(current);
    backend.require_all_gone();
}

fn another_try_is_made_as_often_as_was_asked_for(backend: &Backend) {
    let pause = Duration::from_millis(2);
    let resource = backend.resource_with(Options::new().retry_out_of_memory(3, pause));
    let (start, creates) = (Instant::now(), backend.ledger.count(Call::cuMemCreate));
    assert_eq!(resource.allocate(TOO_MUCH).unwrap_err().code(), Some(CUresult::OUT_OF_MEMORY));
    assert_eq!(backend.ledger.count(Call::cuMemCreate) - creates, 4);
    assert!(start.elapsed() >= 3 * pause);
    resource.allocate(G).unwrap().close().unwrap();
    backend.require_all_gone();
}

fn a_chunk_of_another_resource_keeps_its_access_wherever_it_moves(backend: &Backend) {
    let (resource, readable) = (backend.resource(), backend.resource_with(Options::new().own_access(Access::Read)));
    let buffer = resource.allocate(G).unwrap();
    let options = GrowOptions::new().chunk_of(&readable);
    let mixed = buffer.grow_with(2 * G, &options).unwrap().grow_into(3 * G).unwrap();
    let [write, read] = [CUmemAccess_flags::READWRITE, CUmemAccess_flags::READ];
    assert_eq!(access_of(backend, 0, &mixed), [write, read, write]);
    let occupied = occupy_behind(&mixed);
    let moved = mixed.grow(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    assert_eq!(access_of(backend, 0, &moved), [write, read, write, write]);
    assert_eq!(access_of(backend, 0, &mixed), [write, read, write]);
    // Memory of another kind is no chunk of this: refused before any call.
    let shareable = backend.shareable();
    let host = backend.resource_with(Options::new().location(Location::Host));
    for (other, what) in [(shareable, "handle kind"), (host, "location")] {
        let options = GrowOptions::new().chunk_of(&other);
        let error = backend.require_no_call(|| moved.grow_with(4 * ROOM, &options).unwrap_err());
        assert_eq!(error, Error::ChunkMismatch { what });
    }
    for buffer in [buffer, mixed, moved] {
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

fn a_peer_has_the_access_that_it_was_given_through_every_grow(backend: &Backend) {
    let second = backend.driver.device(1).unwrap();
    let stream = Stream::non_blocking(&second);
    for (access, flags) in [(Access::Read, CUmemAccess_flags::READ), (Access::ReadWrite, CUmemAccess_flags::READWRITE)]
    {
        let resource = backend.resource_with(Options::new().peers([&backend.device, &second], access));
        let buffer = with_room_behind(&resource, G);
        write_marks(&buffer, 2);
        let in_place = buffer.grow(ROOM + G).unwrap();
        let moved = buffer.grow(ROOM + G).unwrap();
        assert_eq!((in_place.outcome(), moved.outcome()), (Some(Outcome::InPlace), Some(Outcome::Moved)));
        for buffer in [&buffer, &in_place, &moved] {
            assert!(access_of(backend, 0, buffer).iter().all(|own| *own == CUmemAccess_flags::READWRITE));
            assert!(access_of(backend, 1, buffer).iter().all(|peer| *peer == flags));
            // The other device sees the bytes, and changes them only where it may.
            let seen = read_at(&stream, buffer.address(), 5000).unwrap();
            let mut own = vec![0; 5000];
            buffer.copy_to_host(0, &mut own).unwrap();
            assert!(seen == own);
            assert_eq!(write_at(&stream, buffer.address(), &seen).is_ok(), access == Access::ReadWrite);
        }
        for buffer in [buffer, in_place, moved] {
            buffer.close().unwrap();
        }
    }
    backend.require_all_gone();
}

fn a_peer_alone_reaches_memory_that_its_own_device_does_not(backend: &Backend) {
    let second = backend.driver.device(1).unwrap();
    let options = Options::new().own_access(Access::None).peer(&second, Access::ReadWrite).alignment(64 * MIB);
    let resource = backend.resource_with(options);
    assert!(resource.is_device_accessible());
    let buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    assert_eq!(access_of(backend, 0, &buffer), [CUmemAccess_flags::NONE; 2]);
    assert_eq!(access_of(backend, 1, &buffer), [CUmemAccess_flags::READWRITE; 2]);
    let (own, theirs) = (Stream::non_blocking(&backend.device), Stream::non_blocking(&second));
    write_at(&theirs, buffer.address(), &pattern(3, 5000)).unwrap();
    assert!(read_at(&theirs, buffer.address(), 5000).unwrap() == pattern(3, 5000));
    assert_eq!(read_at(&own, buffer.address(), 1).unwrap_err().code(), Some(CUresult::INVALID_VALUE));
    buffer.close().unwrap();
    backend.require_all_gone();
}
