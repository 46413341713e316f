//! Memory of the host: touched by the host without any device, and by devices that were granted it.
//!
//! # Safety
//! Slices are made where nobody else touches the memory meanwhile.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use cuvmm::driver::sys::CUmemLocation;
use cuvmm::handles::Allocation;
use cuvmm::resource::Error;
use cuvmm::{
    Access, CUresult, Call, GrowOptions, HandleKind, Location, Options, Outcome, Release, VirtualMemoryResource,
};
use cuvmm_tests::{
    Backend, G, Gate, ROOM, Stream, bytes_of, in_host_function, is_idle, occupy_behind, pattern, queue_fill,
    require_marks, with_room_behind, write_marks,
};

cuvmm_tests::suite!(
    it_needs_no_context_and_copies_make_no_call,
    it_is_copied_in_a_host_function_too,
    the_host_and_a_device_see_what_the_other_wrote,
    it_grows_moves_and_is_cut_with_its_bytes,
    zeroed_it_is_zero,
    threads_that_write_side_by_side_keep_each_others_bytes,
    threads_see_copies_in_their_order,
    a_slice_of_it_is_the_memory,
    its_imports_are_touched_by_the_host_too,
    the_current_node_is_a_node,
    nodes_that_are_not_there_are_refused,
    it_has_no_handles_without_a_node,
    by_default_nothing_is_waited_for,
    a_stream_that_is_given_is_waited_for,
);

const PLACES: [Location; 2] = [Location::Host, Location::HostNuma(0)];

fn resource(backend: &Backend, options: Options) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&backend.device, options).unwrap()
}

/// A resource of the host's memory that the device may use so.
fn granted(backend: &Backend, access: Access) -> VirtualMemoryResource {
    resource(backend, Options::new().location(Location::HostNuma(0)).own_access(access))
}

fn it_needs_no_context_and_copies_make_no_call(backend: &Backend) {
    for location in PLACES {
        for access in [Access::None, Access::ReadWrite] {
            let resource = resource(backend, Options::new().location(location).own_access(access));
            assert_eq!((resource.location(), resource.device_id()), (location, None));
            assert_eq!((resource.is_host_accessible(), resource.is_managed()), (true, false));
            assert_eq!(resource.is_device_accessible(), access != Access::None);
            let buffer = resource.allocate(G).unwrap();
            backend.require_no_call(|| {
                write_marks(&buffer, 1);
                require_marks(&buffer, 1, G);
                buffer.fill(1, G - 2, 7).unwrap();
            });
            let grown = buffer.grow(3 * G).unwrap();
            let zeroed = resource.allocate_zeroed(G).unwrap();
            backend.require_no_call(|| assert_eq!(bytes_of(&grown)[1..G - 1], [7; G - 2]));
            grown.truncate_into(G).unwrap().close().unwrap();
            drop((buffer, zeroed));
        }
    }
    for call in [Call::cuDevicePrimaryCtxRetain, Call::cuStreamCreate, Call::cuMemcpyHtoDAsync, Call::cuMemsetD8Async] {
        assert_eq!(backend.ledger.count(call), 0, "{call:?}");
    }
    backend.require_all_gone();
}

fn it_is_copied_in_a_host_function_too(backend: &Backend) {
    let buffer = Arc::new(granted(backend, Access::ReadWrite).allocate(G).unwrap());
    let stream = Stream::non_blocking(&backend.device);
    queue_fill(&stream, &buffer, 6);
    let theirs = Arc::clone(&buffer);
    let seen = in_host_function(&stream, move || {
        let mut seen = [0; 8];
        theirs.copy_to_host(3, &mut seen)?;
        theirs.copy_from_host(1, &[7]).map(|()| seen)
    });
    assert_eq!(seen, Ok([6; 8]));
    queue_fill(&stream, &buffer, 8);
    stream.synchronize().unwrap();
    assert_eq!(bytes_of(&buffer)[..2], [8, 8]);
}

fn the_host_and_a_device_see_what_the_other_wrote(backend: &Backend) {
    for location in PLACES {
        let resource = resource(backend, Options::new().location(location));
        let buffer = resource.allocate(2 * G).unwrap();
        let stream = Stream::non_blocking(&backend.device);
        let written = pattern(3, 2 * G - 8);
        buffer.copy_from_host(5, &written).unwrap();
        let mut seen = vec![0; written.len()];
        buffer.copy_to_host_on(&stream, 5, &mut seen).unwrap();
        assert!(seen == written, "what the host wrote");

        buffer.fill_on(&stream, G - 7, 20, 9).unwrap();
        buffer.copy_from_host_on(&stream, 1, &[1, 2, 3]).unwrap();
        let mut near = [0; 22];
        buffer.copy_to_host(G - 8, &mut near).unwrap();
        assert_eq!(near[1..21], [9; 20]);
        assert_eq!((near[0], near[21]), (written[G - 13], written[G + 8]));
        let mut first = [0; 4];
        buffer.copy_to_host(1, &mut first).unwrap();
        assert_eq!(first[..3], [1, 2, 3]);
        // Work that somebody else queues is the stream's too.
        queue_fill(&stream, &buffer, 4);
        stream.synchronize().unwrap();
        assert!(bytes_of(&buffer).iter().all(|byte| *byte == 4));
        buffer.close_on(&stream).unwrap();
    }
}

fn it_grows_moves_and_is_cut_with_its_bytes(backend: &Backend) {
    let resource = granted(backend, Access::ReadWrite);
    let buffer = with_room_behind(&resource, G);
    write_marks(&buffer, 5);
    let in_place = buffer.grow(ROOM + G).unwrap();
    assert_eq!((in_place.outcome(), in_place.address()), (Some(Outcome::InPlace), buffer.address()));
    require_marks(&in_place, 5, G);
    write_marks(&in_place, 6);
    require_marks(&buffer, 6, G);

    let occupied = occupy_behind(&in_place);
    let moved = in_place.grow(in_place.capacity() + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    require_marks(&moved, 6, ROOM + G);
    // The same bytes at two addresses.
    moved.fill(0, 1, 1).unwrap();
    assert_eq!(bytes_of(&buffer)[0], 1);
    write_marks(&moved, 7);
    require_marks(&in_place, 7, ROOM + G);
    drop((buffer, in_place));

    let head = moved.truncate(G).unwrap();
    let cut = moved.truncate_into(G).unwrap();
    for buffer in [&head, &cut] {
        require_marks(buffer, 7, G);
        assert_eq!(buffer.chunks().len(), 1);
    }
    head.close().unwrap();
    // A chunk that no device was granted is the host's all the same.
    let alone = granted(backend, Access::None);
    let grown = cut.grow_with(2 * ROOM, &GrowOptions::new().chunk_of(&alone)).unwrap();
    write_marks(&grown, 8);
    require_marks(&grown, 8, 2 * ROOM);
    require_marks(&cut, 8, G);
}

fn zeroed_it_is_zero(backend: &Backend) {
    let options = Options::new().location(Location::HostNuma(0)).own_access(Access::None).max_chunk(2 * G);
    let resource = resource(backend, options);
    // What a driver may hand out again.
    let soiled = resource.allocate(16 * G).unwrap();
    soiled.fill(0, 16 * G, 0xA5).unwrap();
    soiled.close().unwrap();
    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
    let buffer = resource.allocate_zeroed(5 * G - 3).unwrap();
    assert_eq!((buffer.size(), buffer.chunks().len()), (5 * G, 3));
    assert!(is_zero(&bytes_of(&buffer)));
    buffer.fill(3, 5 * G - 3, 1).unwrap();
    let grown = buffer.grow_with(8 * G, &GrowOptions::new().zeroed()).unwrap();
    let bytes = bytes_of(&grown);
    assert!(is_zero(&bytes[..3]) && is_zero(&bytes[5 * G..]));
    assert!(bytes[3..5 * G].iter().all(|byte| *byte == 1), "what was there");
}

/// Words are shared by bytes that different threads write: none of them loses another's.
fn threads_that_write_side_by_side_keep_each_others_bytes(backend: &Backend) {
    const THREADS: usize = 3;
    let resource = granted(backend, Access::None);
    let buffer = resource.allocate(G).unwrap();
    let alias = buffer.grow(2 * G).unwrap();
    let start = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (buffer, start) = (if thread == 0 { &alias } else { &buffer }, &start);
            scope.spawn(move || {
                start.wait();
                // Each has every third run of 1 to 5 bytes, of a few in few words.
                for (round, run) in (0..30_000).flat_map(|round| [0, 3, 6].map(|run| (round, run + thread))) {
                    let (offset, bytes) = (1 + run * 5, 1 + run % 5);
                    let value = [(round % 251) as u8; 5];
                    if round % 2 == 0 {
                        buffer.fill(offset, bytes, value[0]).unwrap();
                    } else {
                        buffer.copy_from_host(offset, &value[..bytes]).unwrap();
                    }
                    let mut seen = [0; 5];
                    buffer.copy_to_host(offset, &mut seen[..bytes]).unwrap();
                    assert_eq!(seen[..bytes], value[..bytes]);
                }
            });
        }
    });
    // On the same bytes each byte is one of those that were written.
    std::thread::scope(|scope| {
        for value in [11, 12, 13] {
            let buffer = &buffer;
            scope.spawn(move || {
                for offset in 0..50 {
                    buffer.fill(offset, 64 << 10, value).unwrap();
                    let mut seen = vec![0; 64 << 10];
                    buffer.copy_to_host(offset, &mut seen).unwrap();
                    assert!(seen.iter().all(|byte| (11..=13).contains(byte)));
                }
            });
        }
    });
}

fn threads_see_copies_in_their_order(backend: &Backend) {
    const ROUNDS: usize = 200;
    let buffer = granted(backend, Access::None).allocate_zeroed(G).unwrap();
    let (writer, reader) = (&buffer, buffer.truncate(G).unwrap());
    let read_so_far = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let read_so_far = &read_so_far;
        scope.spawn(move || {
            for round in 1..=ROUNDS {
                writer.copy_from_host(64, &[round as u8; 100]).unwrap();
                writer.copy_from_host(0, &round.to_ne_bytes()).unwrap();
                while read_so_far.load(Ordering::Relaxed) < round {
                    std::thread::yield_now();
                }
            }
        });
        for round in 1..=ROUNDS {
            let mut flag = [0; 8];
            while usize::from_ne_bytes(flag) < round {
                std::thread::yield_now();
                reader.copy_to_host(0, &mut flag).unwrap();
            }
            let mut data = [0; 100];
            reader.copy_to_host(64, &mut data).unwrap();
            // Told before it is compared, so that a failure leaves nobody waiting.
            read_so_far.store(round, Ordering::Relaxed);
            if data != [round as u8; 100] {
                read_so_far.store(ROUNDS, Ordering::Relaxed);
                panic!("round {round}: {data:?}");
            }
        }
    });
}

fn a_slice_of_it_is_the_memory(backend: &Backend) {
    let resource = granted(backend, Access::ReadWrite);
    let mut buffer = resource.allocate(G).unwrap().grow_into(2 * G).unwrap();
    let address = buffer.host_pointer().map(|pointer| pointer.expose_provenance() as u64);
    assert_eq!(address, Some(buffer.address().0));
    let written = pattern(9, 2 * G);
    // SAFETY: nobody else has the memory.
    unsafe { buffer.as_mut_slice() }.unwrap().copy_from_slice(&written);
    assert!(bytes_of(&buffer) == written);
    let stream = Stream::non_blocking(&backend.device);
    let mut seen = vec![0; 2 * G];
    buffer.copy_to_host_on(&stream, 0, &mut seen).unwrap();
    assert!(seen == written, "what a device sees");
    buffer.fill_on(&stream, G, G, 1).unwrap();
    // SAFETY: nobody writes to it any more.
    let bytes = unsafe { buffer.as_slice() }.unwrap();
    assert!(bytes[..G] == written[..G] && bytes[G..].iter().all(|byte| *byte == 1));
    assert_eq!(backend.resource().allocate(G).unwrap().host_pointer(), None);
}

fn its_imports_are_touched_by_the_host_too(backend: &Backend) {
    let options = Options::new().location(Location::HostNuma(0)).own_access(Access::None);
    let resource = resource(backend, options.handle_kind(HandleKind::PosixFd));
    let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap();
    let handles: Vec<_> =
        buffer.mappings().iter().map(|mapping| mapping.allocation().export_posix_fd().unwrap()).collect();
    // A prefix that ends within a word.
    let size = 3 * G - 5;
    let import = |chunk: usize, size| -> Result<_, Error> {
        Ok(Allocation::import_posix_fd(&backend.driver, handles[chunk].as_fd(), size)?)
    };
    let alias = resource.map_chunks(&[G, 2 * G], size, import).unwrap();
    assert_ne!(alias.address(), buffer.address());
    buffer.fill(0, 3 * G, 1).unwrap();
    alias.fill(0, size, 2).unwrap();
    let bytes = bytes_of(&buffer);
    assert!(bytes[..size].iter().all(|byte| *byte == 2));
    assert_eq!(bytes[size..], [1; 5], "what is behind the prefix");
    buffer.fill(G - 9, 20, 3).unwrap();
    assert_eq!(bytes_of(&alias)[G - 10..G + 12], [[2].as_slice(), &[3; 20], &[2]].concat());
}

fn the_current_node_is_a_node(backend: &Backend) {
    let resource = resource(backend, Options::new().location(Location::HostNumaCurrent).own_access(Access::None));
    let Location::HostNuma(node) = resource.location() else { panic!("{:?}", resource.location()) };
    assert!(node >= 0);
    let buffer = resource.allocate(G).unwrap();
    let made = buffer.mappings()[0].allocation().properties().unwrap().location;
    assert_eq!(made, CUmemLocation::host_numa(node));
}

fn nodes_that_are_not_there_are_refused(backend: &Backend) {
    let refused = |node| {
        let options = Options::new().location(Location::HostNuma(node));
        VirtualMemoryResource::new(&backend.device, options).unwrap_err()
    };
    for node in [-1, i32::MIN] {
        let error = refused(node);
        assert!(matches!(error, Error::NumaNode { node: named, .. } if named == node), "{error:?}");
        assert_eq!(backend.ledger.count(Call::cuMemCreate), 0);
    }
    let error = refused(9999);
    assert!(matches!(error, Error::NumaNodeRefused { node: 9999, .. }), "{error:?}");
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::INVALID_VALUE)));
}

fn it_has_no_handles_without_a_node(backend: &Backend) {
    for kind in [HandleKind::PosixFd, HandleKind::Fabric, HandleKind::PosixFdAndFabric] {
        let options = Options::new().location(Location::Host).handle_kind(kind);
        let made = backend.require_no_call(|| VirtualMemoryResource::new(&backend.device, options));
        assert_eq!(made.map(drop), Err(Error::HandleKindOfHost { kind }));
    }
    let options = Options::new().location(Location::HostNuma(0)).handle_kind(HandleKind::PosixFd);
    assert!(resource(backend, options).is_ipc_enabled());
}

fn by_default_nothing_is_waited_for(backend: &Backend) {
    let resource = granted(backend, Access::ReadWrite);
    let stream = Stream::blocking(&backend.device);
    let gate = Gate::close(&stream);
    let retained = backend.ledger.count(Call::cuDevicePrimaryCtxRetain);
    let make = || resource.allocate(G).unwrap();
    make().close().unwrap();
    drop(make());
    for token in Stream::tokens(&backend.driver) {
        make().close_on(&token).unwrap();
        let buffer = make();
        buffer.set_release(Release::Stream(token)).unwrap();
        buffer.grow_into(2 * G).unwrap().truncate_into(G).unwrap().close().unwrap();
    }
    assert!(!is_idle(&stream), "it waited");
    assert_eq!(backend.ledger.count(Call::cuDevicePrimaryCtxRetain), retained);
    gate.open();
    stream.synchronize().unwrap();
}

fn a_stream_that_is_given_is_waited_for(backend: &Backend) {
    let resource = granted(backend, Access::ReadWrite);
    let stream = Stream::non_blocking(&backend.device);
    let make = || {
        let buffer = resource.allocate(G).unwrap();
        let gate = Gate::close(&stream);
        queue_fill(&stream, &buffer, 1);
        (gate, buffer)
    };
    let (gate, buffer) = make();
    buffer.set_release(Release::Stream(stream.clone())).unwrap();
    gate.require_wait(&stream, || buffer.close()).unwrap();
    let (gate, buffer) = make();
    gate.require_wait(&stream, || buffer.close_on(&stream)).unwrap();
    let (gate, buffer) = make();
    buffer.fence(&stream).unwrap();
    gate.require_wait(&stream, || drop(buffer));
}
