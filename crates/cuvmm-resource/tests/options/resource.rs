//! What a resource is made with, and what it makes: validation, granularities, address space, and memory that comes
//! from elsewhere.

use std::sync::Arc;

use cuvmm_driver::sys::{CUdevice_attribute, CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm_driver::{CUresult, Call};
use cuvmm_handles::Allocation;
use cuvmm_resource::{Error, HandleKind, Options, Outcome, Release, StreamRef, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine, When};

use crate::support::{Bench, G, R};

const MIB: usize = 1 << 20;

#[test]
fn a_device_that_lacks_what_is_asked_is_refused_at_once() {
    let refused = |attribute: CUdevice_attribute, options: Options| {
        let mut machine = Machine::small();
        machine.devices[0].attributes.insert(attribute.0, 0);
        let bench = Bench::new(machine);
        let made = VirtualMemoryResource::new(&bench.device(), options);
        assert!(!bench.simulator.calls().contains(&Call::cuMemGetAllocationGranularity) || made.is_ok());
        made.map(drop)
    };
    let memory = CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    let descriptors = CUdevice_attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    let lacks = |what| Err(Error::Unsupported { what, ordinal: 0 });
    let posix = || Options::new().handle_kind(HandleKind::PosixFd);
    assert_eq!(refused(memory, Options::new()), lacks("virtual memory management"));
    assert_eq!(refused(memory, posix()), lacks("virtual memory management"));
    assert_eq!(refused(descriptors, posix()), lacks("memory exported as POSIX file descriptors"));
    assert_eq!(refused(descriptors, Options::new()), Ok(()), "what is not asked for is not needed");
}

#[test]
fn options_that_can_not_be_are_refused_before_any_call() {
    let bench = Bench::small();
    for alignment in [3, R + 1, usize::MAX] {
        let made = VirtualMemoryResource::new(&bench.device(), Options::new().alignment(alignment));
        assert_eq!(made.map(drop), Err(Error::Alignment { alignment }));
    }
    let other = Bench::small();
    let stream = StreamRef::create(&other.device()).unwrap();
    let made = VirtualMemoryResource::new(&bench.device(), Options::new().release(Release::Stream(stream)));
    assert_eq!(made.map(drop), Err(Error::Driver(cuvmm_driver::Error::DifferentDrivers)));
    bench.assert_no_call();
}

#[test]
fn a_resource_says_what_it_was_made_with() {
    let bench = Bench::small();
    let resource = bench.resource(Options::new().handle_kind(HandleKind::PosixFd).alignment(16 * MIB));
    assert_eq!((resource.handle_kind(), resource.options().alignment), (HandleKind::PosixFd, 16 * MIB));
    assert!(matches!(resource.options().release, Release::DefaultStream));
    assert!(resource.is_ipc_enabled() && !bench.plain().is_ipc_enabled());
    assert_eq!((resource.device(), resource.granularity().bytes()), (&bench.device(), G));
    assert_eq!(resource.clone(), resource);
    assert_ne!(resource, bench.plain());
}

#[test]
fn queries_are_over_when_the_resource_is_made() {
    let bench = Bench::small();
    let resource = bench.plain();
    bench.simulator.clear_calls();
    let buffer = resource.allocate(1).unwrap();
    let calls = [Call::cuMemAddressReserve, Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess];
    assert_eq!(bench.simulator.calls(), calls);
    drop((resource, buffer));
    bench.assert_clean();
}

#[test]
fn the_base_is_aligned_and_what_is_added_need_not_be() {
    for bench in Bench::presets() {
        let resource = bench.resource(Options::new().alignment(16 * MIB));
        let buffer = resource.allocate(2 * MIB).unwrap();
        assert_eq!(buffer.address().0 % (16 * MIB) as u64, 0);
        for size in [4 * MIB, 34 * MIB, 100 * MIB] {
            let grown = buffer.grow(size).unwrap();
            assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
        }
        drop(buffer);
        bench.assert_clean();
    }
    let bench = Bench::new(Machine::small().hints(Hints::Refused(CUresult::INVALID_VALUE)));
    let buffer = bench.resource(Options::new().alignment(16 * MIB)).allocate(2 * MIB).unwrap();
    let moved = buffer.grow(40 * MIB).unwrap();
    assert_eq!((moved.outcome(), moved.address().0 % (16 * MIB) as u64), (Some(Outcome::Moved), 0));
}

#[test]
fn sizes_round_up_to_the_granularity_of_the_memory() {
    for (granularity, machine) in [
        (64 << 10, Machine::small()),
        (2 * MIB, Machine::h200()),
        (32 * MIB, Machine::h200().granularity(|_, _| 32 << 20)),
    ] {
        for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
            let bench = Bench::new(machine.clone().hints(hints));
            let resource = bench.plain();
            for (asked, size) in [
                (1, granularity),
                (6912, granularity),
                (granularity - 1, granularity),
                (granularity, granularity),
                (granularity + 1, 2 * granularity),
            ] {
                let buffer = resource.allocate(asked).unwrap();
                assert_eq!((buffer.size(), bench.simulator.physical_bytes(0)), (size, size), "{asked}");
                assert_eq!(buffer.address().0 % granularity.max(R) as u64, 0);
                let grown = buffer.grow(size + 1).unwrap();
                assert_eq!(grown.size(), size + granularity);
                grown.fill(0, grown.size(), 1).unwrap();
                drop((grown, buffer));
            }
            drop(resource);
            bench.assert_clean();
        }
    }
}

#[test]
fn sizes_that_overflow_reach_no_driver() {
    let bench = Bench::small();
    let resource = bench.plain();
    let buffer = resource.allocate(G).unwrap();
    bench.simulator.clear_calls();
    for size in [usize::MAX, usize::MAX - G + 2] {
        let overflow = cuvmm_handles::Error::SizeOverflow { bytes: size, granularity: G };
        assert_eq!(resource.allocate(size).map(drop), Err(overflow.clone().into()));
        assert_eq!(resource.allocate_with_capacity(size, size).map(drop), Err(overflow.clone().into()));
        assert_eq!(buffer.grow(size).map(drop), Err(overflow.into()));
    }
    bench.assert_no_call();
}

#[test]
fn no_bytes_are_a_buffer_that_costs_nothing_and_grows() {
    for bench in Bench::presets() {
        let resource = bench.plain();
        bench.simulator.clear_calls();
        let empty = resource.allocate(0).unwrap();
        assert!(empty.is_empty() && empty.capacity() == 0 && empty.chunks().is_empty() && empty.address().0 == 0);
        assert_eq!(empty.resource(), &resource);
        empty.copy_from_host(0, &[]).unwrap();
        empty.fill(0, 0, 1).unwrap();
        let still = empty.grow(0).unwrap();
        assert_eq!((still.outcome(), still.size()), (Some(Outcome::Covered), 0));
        still.close().unwrap();
        let other = resource.allocate(0).unwrap();
        other.close().unwrap();
        bench.assert_no_call();
        let grown = empty.grow(1).unwrap();
        assert_eq!((grown.size(), grown.chunks().len()), (G, 1));
        empty.close().unwrap();
        grown.close().unwrap();
        bench.assert_clean();
    }
}

#[test]
fn no_bytes_with_capacity_have_an_address_that_stays() {
    for bench in Bench::presets() {
        let resource = bench.plain();
        let empty = resource.allocate_with_capacity(0, 3 * R).unwrap();
        assert_eq!(empty.size(), 0);
        assert!(empty.capacity() >= 3 * R && empty.address().0 != 0);
        let first = empty.grow(R).unwrap();
        assert_eq!((first.outcome(), first.address()), (Some(Outcome::InPlace), empty.address()));
        // The addresses are the first one's now.
        let second = empty.grow(R).unwrap();
        assert_eq!(second.outcome(), Some(Outcome::Moved));
        drop((empty, first, second));

        let nothing = resource.allocate_with_capacity(0, 0).unwrap();
        assert_eq!((nothing.size(), nothing.capacity(), nothing.address().0), (0, 0, 0));
        drop((nothing, resource));
        bench.assert_clean();
    }
}

#[test]
fn capacity_is_what_can_be_had() {
    let bench = Bench::new(Machine::small().address_window(64 * MIB as u64));
    let resource = bench.plain();
    for wanted in [65 * MIB, 1 << 40, 1 << 46, usize::MAX] {
        let buffer = resource.allocate_with_capacity(2 * MIB, wanted).unwrap();
        assert_eq!((buffer.size(), buffer.capacity() % R), (2 * MIB, 0), "{wanted}");
        assert!((32 * MIB..=64 * MIB).contains(&buffer.capacity()), "{}", buffer.capacity());
        let grown = buffer.grow(buffer.capacity()).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        drop((buffer, grown));
        bench.assert_clean();
    }
    let all = resource.allocate(64 * MIB).unwrap();
    let error = resource.allocate(1).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressReserve), Some(CUresult::OUT_OF_MEMORY)));
    assert_eq!(resource.allocate_with_capacity(1, R).unwrap_err(), error);
    let empty = resource.allocate_with_capacity(0, R).unwrap();
    assert_eq!((empty.size(), empty.capacity()), (0, 0), "no addresses, and none needed");
    drop((all, empty));
    bench.assert_clean();
}

#[test]
fn memory_that_runs_out_is_told_by_its_own_call() {
    for bench in Bench::presets() {
        let resource = bench.plain();
        let half = resource.allocate(512 * MIB).unwrap();
        let before = bench.simulator.live();
        let out_of_memory = |error: Error| {
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::OUT_OF_MEMORY)));
            assert_eq!(bench.simulator.live(), before);
        };
        out_of_memory(resource.allocate(513 * MIB).unwrap_err());
        out_of_memory(resource.allocate_with_capacity(513 * MIB, 1 << 40).unwrap_err());
        out_of_memory(half.grow(1025 * MIB).unwrap_err());
        let (error, half) = half.grow_into(1025 * MIB).unwrap_err().into_parts();
        out_of_memory(error);
        half.grow_into(1024 * MIB).unwrap().close().unwrap();
        bench.assert_clean();
    }
}

/// Memory of `units` times the granularity, as somebody else would make it.
fn allocation(bench: &Bench, size: cuvmm_handles::GranularSize) -> Allocation {
    let location = bench.device().location();
    Allocation::create(&bench.driver, size, &CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE))
        .unwrap()
}

#[test]
fn chunks_from_elsewhere_lie_side_by_side() {
    for bench in Bench::presets() {
        let resource = bench.plain();
        let sizes = [3 * G, G, 40 * G, 2 * G];
        let buffer = resource.map_chunks(&sizes, 45 * G + 1, |index, size| {
            assert_eq!(size.bytes(), sizes[index]);
            Ok::<_, Error>(allocation(&bench, size))
        });
        let buffer = buffer.unwrap();
        assert_eq!((buffer.size(), buffer.outcome()), (45 * G + 1, None));
        assert_eq!(buffer.chunks().iter().map(|chunk| chunk.size).collect::<Vec<_>>(), sizes);
        buffer.fill(0, buffer.size(), 3).unwrap();
        assert!(bench.bytes_of(&buffer).iter().all(|byte| *byte == 3));
        let beyond = buffer.copy_from_host(45 * G, &[0, 0]).unwrap_err();
        assert_eq!(beyond, Error::OutOfBounds { offset: 45 * G, bytes: 2, size: 45 * G + 1 });

        // The rest of the last chunk is there already.
        let all = buffer.grow(45 * G + 2).unwrap();
        assert_eq!((all.size(), all.outcome()), (46 * G, Some(Outcome::Covered)));
        drop((buffer, all, resource));
        bench.assert_clean();
    }
}

#[test]
fn a_prefix_shows_the_chunks_that_cover_it_alone() {
    let bench = Bench::small();
    let resource = bench.plain();
    for (size, chunks) in [(1, 1), (G, 1), (G + 1, 2), (2 * G, 2), (3 * G, 3)] {
        let make = |_, size| Ok::<_, Error>(allocation(&bench, size));
        let buffer = resource.map_chunks(&[G, G, G], size, make).unwrap();
        assert_eq!((buffer.size(), buffer.chunks().len(), buffer.mappings().len()), (size, chunks, chunks));
    }
}

#[test]
fn chunk_lists_that_can_not_be_reach_no_driver() {
    let bench = Bench::small();
    let resource = bench.plain();
    bench.simulator.clear_calls();
    let refused = |chunks: &[usize], size: usize| {
        let made =
            resource.map_chunks(chunks, size, |_, _| -> Result<Allocation, Error> { panic!("asked for memory") });
        made.map(drop).unwrap_err()
    };
    let granular = |bytes| Error::Handles(cuvmm_handles::Error::NotGranular { bytes, granularity: G });
    assert_eq!(refused(&[G, G], 2 * G + 1), Error::Chunks { size: 2 * G + 1, sum: 2 * G });
    assert_eq!(refused(&[G], 0), Error::Chunks { size: 0, sum: G });
    assert_eq!(refused(&[], 1), Error::Chunks { size: 1, sum: 0 });
    assert_eq!(refused(&[G, 0], G), Error::Chunks { size: G, sum: G });
    assert_eq!(refused(&[G, G + 1], G), granular(G + 1));
    let huge = usize::MAX - G + 1;
    let overflow = cuvmm_handles::Error::SizeOverflow { bytes: huge, granularity: G };
    assert_eq!(refused(&[huge, huge], G), overflow.into());
    bench.assert_no_call();
    assert!(resource.map_chunks(&[], 0, |_, _| -> Result<Allocation, Error> { panic!("asked") }).unwrap().is_empty());
    bench.assert_no_call();
}

#[test]
fn whichever_chunk_fails_everything_is_undone() {
    #[derive(Debug, PartialEq)]
    enum Mine {
        Gone(usize),
        Theirs(Error),
    }
    impl From<Error> for Mine {
        fn from(error: Error) -> Self {
            Self::Theirs(error)
        }
    }
    const SIZES: [usize; 8] = [G; 8];
    for failing in 0..SIZES.len() {
        let (bench, other) = (Bench::small(), Bench::small());
        let resource = bench.plain();
        let make = |failing: usize, fail: &dyn Fn(usize) -> Result<Allocation, Mine>| {
            let made = resource.map_chunks(&SIZES, 8 * G, |index, size| {
                if index == failing { fail(index) } else { Ok(allocation(&bench, size)) }
            });
            let error = made.map(drop).unwrap_err();
            bench.assert_clean();
            error
        };
        assert_eq!(make(failing, &|index| Err(Mine::Gone(index))), Mine::Gone(failing));

        let longer = resource.granularity().exact(2 * G).unwrap();
        let error = make(failing, &|_| Ok(allocation(&bench, longer)));
        assert!(matches!(error, Mine::Theirs(Error::Handles(cuvmm_handles::Error::OutOfBounds { .. }))));

        let size = resource.granularity().exact(G).unwrap();
        let error = make(failing, &|_| Ok(allocation(&other, size)));
        let different = cuvmm_handles::Error::Driver(cuvmm_driver::Error::DifferentDrivers);
        assert_eq!(error, Mine::Theirs(different.into()));

        for call in [Call::cuMemMap, Call::cuMemSetAccess] {
            bench.faults.fail(call, failing + 1, CUresult::UNKNOWN, When::Before);
            let error = make(usize::MAX, &|_| unreachable!());
            assert!(matches!(&error, Mine::Theirs(error) if error.call() == Some(call)));
        }
        // Somebody's panic is no reason to leak.
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            make(failing, &|_| std::panic::resume_unwind(Box::new("mine")))
        }));
        assert!(panicked.is_err());
        let buffer = resource.map_chunks(&SIZES, 8 * G, |_, size| Ok::<_, Error>(allocation(&bench, size))).unwrap();
        buffer.close().unwrap();
        bench.assert_clean();
        other.assert_clean();
    }
}

/// Threads that grow one buffer at once each get their own memory; at most one gets the addresses behind.
#[test]
fn of_many_grows_at_once_one_gets_the_addresses() {
    for bench in Bench::presets() {
        let buffer = Arc::new(bench.plain().allocate_with_capacity(G, R).unwrap());
        buffer.fill(0, G, 1).unwrap();
        let start = std::sync::Barrier::new(8);
        let grown: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8_u8)
                .map(|thread| {
                    let (buffer, start) = (&buffer, &start);
                    scope.spawn(move || {
                        start.wait();
                        let grown = buffer.grow(2 * G).unwrap();
                        grown.fill(G, G, 10 + thread).unwrap();
                        grown
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let in_place = grown.iter().filter(|grown| grown.outcome() == Some(Outcome::InPlace)).count();
        assert_eq!(in_place, 1);
        for (thread, grown) in grown.iter().enumerate() {
            let bytes = bench.bytes_of(grown);
            assert!(bytes[..G].iter().all(|byte| *byte == 1));
            assert!(bytes[G..].iter().all(|byte| usize::from(*byte) == 10 + thread));
        }
        drop((buffer, grown));
        bench.assert_clean();
    }
}
