//! Ranges that others made: taken over as buffers, given back at once, and seen through addresses of ours.
//!
//! # Safety
//! A range is the test's own, made by raw calls. It is given away once, or not at all where it is refused, and no work is
//! on it but what its release is behind.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::driver::sys::{CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemLocation, CUstreamCaptureMode};
use cuvmm::resource::Error;
use cuvmm::{
    Call, DeallocateError, HandleKind, Location, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource,
};
use cuvmm_tests::{
    Backend, Capture, Current, ForeignRange, G, Gate, ROOM, Stream, in_host_function, occupy_behind, require_marks,
    write_marks,
};

cuvmm_tests::suite!(
    a_range_of_others_is_a_buffer_like_any_other,
    however_it_was_made_it_is_taken_over_whole,
    chunks_of_others_move_with_their_own_access,
    memory_of_the_host_moves_with_the_hosts_access,
    what_is_taken_over_is_not_exported,
    it_truncates_and_gives_back_mapping_by_mapping,
    what_is_no_virtual_memory_is_refused,
    what_is_no_whole_range_is_refused_and_stays_as_it_was,
    memory_that_lies_elsewhere_is_refused,
    deallocate_waits_for_the_stream_that_it_is_given,
    deallocate_waits_for_the_default_stream_by_name_or_not,
    deallocate_without_a_stream_waits_for_nothing,
    default_streams_mean_nothing_to_memory_of_the_host,
    deallocate_beside_a_capture_of_its_stream_releases_nothing,
    deallocate_in_a_host_function_releases_nothing,
    values_of_another_driver_are_refused_without_a_call,
    an_alias_of_others_memory_has_the_same_bytes_and_outlives_theirs,
    an_alias_takes_whole_mappings,
    what_is_taken_over_and_wrapped_is_counted,
);

/// The granules of the mappings of a range that has room behind them.
const GRANULES: [usize; 3] = [2, 1, 4];

fn device_range(backend: &Backend, granules: &[usize]) -> ForeignRange {
    ForeignRange::make(backend, backend.device.location(), granules, ROOM)
}

fn adopt(
    resource: &VirtualMemoryResource,
    range: &ForeignRange,
    release: Release,
) -> Result<VirtualMemoryBuffer, Error> {
    // SAFETY: the range is the test's to give away.
    unsafe { resource.from_raw(range.address, range.size, release) }
}

fn deallocate(resource: &VirtualMemoryResource, range: &ForeignRange, release: Release) -> Result<(), DeallocateError> {
    // SAFETY: the range is the test's to give away.
    unsafe { resource.deallocate(range.address, range.size, release) }
}

/// A resource of memory of the host, and the driver's name of where that is.
fn host(backend: &Backend) -> (VirtualMemoryResource, CUmemLocation) {
    let options = Options::new().location(Location::HostNumaCurrent);
    let resource = VirtualMemoryResource::new(&backend.device, options).unwrap();
    let Location::HostNuma(node) = resource.location() else { panic!("no node: {:?}", resource.location()) };
    (resource, CUmemLocation::host_numa(node))
}

fn access_of(buffer: &VirtualMemoryBuffer) -> Vec<Vec<CUmemAccessDesc>> {
    buffer.chunks().into_iter().map(|chunk| chunk.access).collect()
}

/// Demands that each chunk is granted to whom it says it is, by the driver's word.
#[track_caller]
fn require_access(backend: &Backend, buffer: &VirtualMemoryBuffer) {
    for chunk in buffer.chunks() {
        let device = backend.device.location();
        let flags =
            chunk.access.iter().find(|desc| desc.location == device).map_or(CUmemAccess_flags::NONE, |d| d.flags);
        assert_eq!(backend.driver.mem_get_access(device, chunk.address).unwrap(), flags, "{chunk:?}");
    }
}

fn a_range_of_others_is_a_buffer_like_any_other(backend: &Backend) {
    let resource = backend.resource();
    let range = device_range(backend, &GRANULES);
    let buffer = adopt(&resource, &range, Release::DefaultStream).unwrap();
    assert_eq!((buffer.address(), buffer.size(), buffer.capacity()), (range.address, 7 * G, ROOM));
    assert_eq!((buffer.outcome(), buffer.resource()), (None, &resource));
    assert!(matches!(buffer.released_after(), Release::DefaultStream));
    let sizes: Vec<usize> = buffer.chunks().iter().map(|chunk| chunk.size).collect();
    assert_eq!(sizes, GRANULES.map(|granules| granules * G));
    write_marks(&buffer, 1);

    let larger = buffer.grow(9 * G).unwrap();
    assert_eq!((larger.outcome(), larger.address()), (Some(Outcome::InPlace), range.address));
    require_marks(&larger, 1, 7 * G);
    write_marks(&larger, 2);
    buffer.close().unwrap();
    require_marks(&larger, 2, 9 * G);
    let occupied = occupy_behind(&larger);
    let moved = larger.grow(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    larger.close().unwrap();
    require_marks(&moved, 2, 9 * G);
    moved.close().unwrap();
    backend.require_all_gone();
}

fn however_it_was_made_it_is_taken_over_whole(backend: &Backend) {
    let resource = backend.resource();
    // Whether a handle is released: before its mapping's access is granted, after that, or after the range was taken over.
    for released in [0, 1, 2] {
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let mut range = ForeignRange::reserve(backend, backend.device.location(), ROOM);
            let offsets = [0, 2 * G, 3 * G];
            for index in order {
                range.map(offsets[index], GRANULES[index] * G);
            }
            for index in order {
                if released == 0 {
                    range.release(index);
                }
                range.grant(index, &range.everybody(backend));
                if released == 1 {
                    range.release(index);
                }
            }
            let buffer = adopt(&resource, &range, Release::Caller).unwrap();
            if released == 2 {
                order.into_iter().for_each(|index| range.release(index));
            }
            write_marks(&buffer, 3);
            require_marks(&buffer, 3, 7 * G);
            drop(buffer);
            backend.require_all_gone();
        }
    }
    // A handle that is kept keeps its memory, and nothing more.
    let mark = backend.mark();
    let mut range = ForeignRange::reserve(backend, backend.device.location(), ROOM);
    range.map(0, G);
    deallocate(&resource, &range, Release::Caller).unwrap();
    assert!(!resource.is_vmm(range.address).unwrap());
    range.release(0);
    backend.require_unchanged(&mark);
}

fn chunks_of_others_move_with_their_own_access(backend: &Backend) {
    let resource = backend.resource();
    let range = ForeignRange::make(backend, backend.device.location(), &[1, 1, 14], ROOM);
    let location = backend.device.location();
    let desc = |flags| CUmemAccessDesc { location, flags };
    range.grant(1, &[desc(CUmemAccess_flags::READ)]);
    range.grant(2, &[desc(CUmemAccess_flags::NONE)]);
    let buffer = adopt(&resource, &range, Release::Caller).unwrap();
    let expect = [vec![desc(CUmemAccess_flags::READWRITE)], vec![desc(CUmemAccess_flags::READ)], vec![]];
    assert_eq!(access_of(&buffer), expect);
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    assert_eq!(access_of(&moved)[..3], expect);
    require_access(backend, &moved);
    moved.close().unwrap();
    backend.require_all_gone();
}

fn memory_of_the_host_moves_with_the_hosts_access(backend: &Backend) {
    let (resource, location) = host(backend);
    let device = backend.device.location();
    for (granted, place) in
        [(vec![device, location], "both"), (vec![device], "the device"), (vec![location], "the host")]
    {
        let range = ForeignRange::make(backend, location, &[1, 15], ROOM);
        let access: Vec<CUmemAccessDesc> = [device, location]
            .map(|location| {
                let is_granted = granted.contains(&location);
                let flags = if is_granted { CUmemAccess_flags::READWRITE } else { CUmemAccess_flags::NONE };
                CUmemAccessDesc { location, flags }
            })
            .into();
        range.grant(1, &access);
        let buffer = adopt(&resource, &range, Release::Caller).unwrap();
        let expect: Vec<CUmemAccessDesc> =
            access.into_iter().filter(|desc| desc.flags != CUmemAccess_flags::NONE).collect();
        assert_eq!(access_of(&buffer)[1], expect, "{place}");
        let occupied = occupy_behind(&buffer);
        let moved = buffer.grow_into(ROOM + G).unwrap();
        drop(occupied);
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        assert_eq!(access_of(&moved)[1], expect, "{place}");
        require_access(backend, &moved);
        let host = backend.driver.mem_get_access(location, moved.chunks()[1].address).unwrap();
        assert_eq!(host != CUmemAccess_flags::NONE, granted.contains(&location), "{place}");
        moved.close().unwrap();
    }
    backend.require_all_gone();
}

fn what_is_taken_over_is_not_exported(backend: &Backend) {
    let range = device_range(backend, &[1]);
    let buffer = adopt(&backend.shareable(), &range, Release::Caller).unwrap();
    assert_eq!(buffer.resource().handle_kind(), HandleKind::PosixFd);
    let refused = backend.require_no_call(|| cuvmm::ipc::export(&buffer)).unwrap_err();
    assert!(matches!(refused, cuvmm::ipc::Error::NotExportable { .. }), "{refused}");
    assert_eq!(buffer.export_kinds().0, 0);
    buffer.close().unwrap();
    backend.require_all_gone();
}

fn it_truncates_and_gives_back_mapping_by_mapping(backend: &Backend) {
    let range = device_range(backend, &GRANULES);
    let buffer = adopt(&backend.resource(), &range, Release::Caller).unwrap();
    write_marks(&buffer, 4);
    let unmaps = backend.watch(Call::cuMemUnmap);
    let frees = backend.watch(Call::cuMemAddressFree);
    let start = range.address.0;
    let at = |granule: usize| start + (granule * G) as u64;
    let head = buffer.truncate_into(2 * G).unwrap();
    assert_eq!((head.size(), head.capacity()), (2 * G, ROOM));
    assert_eq!(unmaps.take_pairs(), [(at(3), 4 * G as u64), (at(2), G as u64)]);
    require_marks(&head, 4, 2 * G);
    let grown = head.grow_into(5 * G).unwrap();
    assert_eq!((grown.address(), grown.outcome()), (range.address, Some(Outcome::InPlace)));
    require_marks(&grown, 4, 2 * G);
    grown.close().unwrap();
    assert_eq!(unmaps.take_pairs(), [(at(2), 3 * G as u64), (at(0), 2 * G as u64)]);
    assert_eq!(frees.take_pairs(), [(start, ROOM as u64)]);
    backend.require_all_gone();
}

fn what_is_no_virtual_memory_is_refused(backend: &Backend) {
    let resource = backend.resource();
    let _current = Current::push(&backend.device);
    let plain = backend.driver.mem_alloc(ROOM).unwrap();
    let reserved = ForeignRange::reserve(backend, backend.device.location(), ROOM);
    let freed = ForeignRange::reserve(backend, backend.device.location(), ROOM);
    freed.clone().take_down();
    let local = std::ptr::from_ref(&resource).addr() as u64;
    let mark = backend.mark();
    for address in
        [plain, reserved.address, freed.address, CUdeviceptr(local), CUdeviceptr(0), CUdeviceptr(u64::MAX - 1)]
    {
        assert!(!resource.is_vmm(address).unwrap(), "{address}");
        // SAFETY: it is refused.
        let adopted = unsafe { resource.from_raw(address, ROOM, Release::Caller) };
        assert_eq!(adopted.unwrap_err(), Error::NotVmm { address });
        // SAFETY: as above.
        let gone = unsafe { resource.deallocate(address, ROOM, Release::Caller) }.unwrap_err();
        assert_eq!((gone.error(), gone.is_deallocated()), (&Error::NotVmm { address }, false));
        // SAFETY: as above.
        assert_eq!(unsafe { resource.wrap(address, ROOM) }.unwrap_err(), Error::NotVmm { address });
    }
    backend.require_unchanged(&mark);
    // SAFETY: nobody uses it.
    unsafe { backend.driver.mem_free(plain) }.unwrap();
    reserved.take_down();
}

fn what_is_no_whole_range_is_refused_and_stays_as_it_was(backend: &Backend) {
    let resource = backend.resource();
    let range = device_range(backend, &GRANULES);
    let mark = backend.mark();
    let (start, second) = (range.address, range.address.checked_add(2 * G).unwrap());
    let other =
        |address, size| Error::NotOneReservation { address, size, found_address: start, found_size: ROOM as u64 };
    let odd = |bytes| Error::Handles(cuvmm::handles::Error::NotGranular { bytes, granularity: G });
    for (address, size, expect) in [
        (start, ROOM - G, other(start, ROOM - G)),
        (start, ROOM + G, other(start, ROOM + G)),
        (start, 0, other(start, 0)),
        (start, 2 * G, other(start, 2 * G)),
        (second, ROOM, other(second, ROOM)),
        (second, ROOM - 2 * G, other(second, ROOM - 2 * G)),
        (start, ROOM - 1, odd(ROOM - 1)),
    ] {
        // SAFETY: it is refused.
        assert_eq!(unsafe { resource.from_raw(address, size, Release::Caller) }.unwrap_err(), expect);
        // SAFETY: as above.
        let refused = unsafe { resource.deallocate(address, size, Release::Caller) }.unwrap_err();
        assert_eq!((refused.error(), refused.is_deallocated()), (&expect, false));
        backend.require_unchanged(&mark);
    }
    deallocate(&resource, &range, Release::Caller).unwrap();

    // Another mapping than those that join, at any distance.
    for hole in [1, 5, 8] {
        let mut range = device_range(backend, &GRANULES);
        range.map((7 + hole) * G, G);
        let address = range.address.checked_add((7 + hole) * G).unwrap();
        let refused = adopt(&resource, &range, Release::Caller).unwrap_err();
        assert_eq!(refused, Error::MappedBehindHole { address });
        range.take_down();
    }
    backend.require_all_gone();
}

fn memory_that_lies_elsewhere_is_refused(backend: &Backend) {
    let (of_host, location) = host(backend);
    let of_device = backend.resource();
    for (resource, other, right) in
        [(&of_device, location, &of_host), (&of_host, backend.device.location(), &of_device)]
    {
        let range = ForeignRange::make(backend, other, &GRANULES, ROOM);
        let mark = backend.mark();
        let expect = Error::OtherLocation { address: range.address, location: other };
        assert_eq!(adopt(resource, &range, Release::Caller).unwrap_err(), expect);
        let refused = deallocate(resource, &range, Release::Caller).unwrap_err();
        assert_eq!((refused.error(), refused.is_deallocated()), (&expect, false));
        // SAFETY: it is refused.
        assert_eq!(unsafe { resource.wrap(range.address, range.mapped()) }.unwrap_err(), expect);
        backend.require_unchanged(&mark);
        deallocate(right, &range, Release::Caller).unwrap();
    }
    backend.require_all_gone();
}

fn deallocate_waits_for_the_stream_that_it_is_given(backend: &Backend) {
    let (of_host, location) = host(backend);
    for (resource, location) in [(backend.resource(), backend.device.location()), (of_host, location)] {
        let range = ForeignRange::make(backend, location, &GRANULES, ROOM);
        let stream = Stream::non_blocking(&backend.device);
        let gate = Gate::close(&stream);
        gate.require_wait(&stream, || deallocate(&resource, &range, Release::Stream(stream.clone())).unwrap());
    }
    backend.require_all_gone();
}

fn deallocate_waits_for_the_default_stream_by_name_or_not(backend: &Backend) {
    let resource = backend.resource();
    let tokens = Stream::tokens(&backend.driver).map(Release::Stream);
    for release in [Release::DefaultStream].into_iter().chain(tokens) {
        let range = device_range(backend, &GRANULES);
        let stream = Stream::blocking(&backend.device);
        let gate = Gate::close(&stream);
        gate.require_wait(&stream, || deallocate(&resource, &range, release).unwrap());
    }
    backend.require_all_gone();
}

fn deallocate_without_a_stream_waits_for_nothing(backend: &Backend) {
    let range = device_range(backend, &GRANULES);
    let stream = Stream::blocking(&backend.device);
    let gate = Gate::close(&stream);
    deallocate(&backend.resource(), &range, Release::Caller).unwrap();
    assert!(!cuvmm_tests::is_idle(&stream));
    gate.open();
    stream.synchronize().unwrap();
    backend.require_all_gone();
}

fn default_streams_mean_nothing_to_memory_of_the_host(backend: &Backend) {
    let (resource, location) = host(backend);
    let tokens = Stream::tokens(&backend.driver).map(Release::Stream);
    for release in [Release::DefaultStream].into_iter().chain(tokens) {
        let range = ForeignRange::make(backend, location, &GRANULES, ROOM);
        let stream = Stream::blocking(&backend.device);
        let gate = Gate::close(&stream);
        deallocate(&resource, &range, release).unwrap();
        assert!(!cuvmm_tests::is_idle(&stream));
        gate.open();
        stream.synchronize().unwrap();
    }
    backend.require_all_gone();
}

fn deallocate_beside_a_capture_of_its_stream_releases_nothing(backend: &Backend) {
    let resource = backend.resource();
    let stream = Stream::non_blocking(&backend.device);
    let other = resource.allocate(G).unwrap();
    let range = device_range(backend, &GRANULES);
    let capture = Capture::begin(&stream, CUstreamCaptureMode::GLOBAL, &other);
    let mark = backend.mark();
    let refused = deallocate(&resource, &range, Release::Stream(stream.clone())).unwrap_err();
    assert_eq!((refused.error(), refused.is_deallocated()), (&Error::StreamCapturing, false));
    backend.require_unchanged(&mark);
    capture.end();
    deallocate(&resource, &range, Release::Stream(stream)).unwrap();
    other.close().unwrap();
    backend.require_all_gone();
}

fn deallocate_in_a_host_function_releases_nothing(backend: &Backend) {
    let resource = backend.resource();
    let range = device_range(backend, &GRANULES);
    let stream = Stream::non_blocking(&backend.device);
    let mark = backend.mark();
    let (theirs, there) = (resource.clone(), range.clone());
    let (adopted, gone, alias) = in_host_function(&stream, move || {
        // SAFETY: it is refused.
        let alias = unsafe { theirs.wrap(there.address, there.mapped()) };
        (adopt(&theirs, &there, Release::Caller), deallocate(&theirs, &there, Release::Caller), alias)
    });
    assert_eq!(adopted.unwrap_err(), Error::HostCallback);
    assert_eq!(alias.unwrap_err(), Error::HostCallback);
    let gone = gone.unwrap_err();
    assert_eq!((gone.error(), gone.is_deallocated()), (&Error::HostCallback, false));
    if let Some(simulator) = &backend.simulator {
        // One question each, and nothing else.
        let calls: Vec<Call> = simulator.violations().iter().map(|violation| violation.call).collect();
        assert_eq!(calls, [Call::cuCtxGetCurrent; 3]);
        simulator.clear_violations();
    }
    backend.require_unchanged(&mark);
    range.take_down();
}

fn values_of_another_driver_are_refused_without_a_call(backend: &Backend) {
    let other = backend.another();
    let stream = Stream::non_blocking(&other.device);
    let range = device_range(backend, &[1]);
    let resource = backend.resource();
    let different = Error::Driver(cuvmm::driver::Error::DifferentDrivers);
    backend.require_no_call(|| {
        let release = || Release::Stream(stream.clone());
        assert_eq!(adopt(&resource, &range, release()).unwrap_err(), different);
        let refused = deallocate(&resource, &range, release()).unwrap_err();
        assert_eq!((refused.error(), refused.is_deallocated()), (&different, false));
    });
    range.take_down();
    drop(stream);
    other.finish();
}

fn an_alias_of_others_memory_has_the_same_bytes_and_outlives_theirs(backend: &Backend) {
    let (of_host, location) = host(backend);
    for (resource, location) in [(backend.resource(), backend.device.location()), (of_host, location)] {
        let range = ForeignRange::make(backend, location, &GRANULES, ROOM);
        // SAFETY: the memory is the test's, which refers to nothing in it.
        let alias = unsafe { resource.wrap(range.address, range.mapped()) }.unwrap();
        assert_ne!(alias.address(), range.address);
        assert_eq!((alias.size(), alias.chunks().len()), (7 * G, GRANULES.len()));
        // SAFETY: as above; the alias's own addresses are mapped memory, too.
        let again = unsafe { resource.wrap(alias.address(), 2 * G) }.unwrap();
        write_marks(&alias, 5);
        require_marks(&again, 5, 2 * G);
        again.close().unwrap();
        range.take_down();
        require_marks(&alias, 5, 7 * G);
        let grown = alias.grow_into(8 * G).unwrap();
        require_marks(&grown, 5, 7 * G);
        grown.close().unwrap();
    }
    // SAFETY: no bytes are nobody's.
    let empty = unsafe { backend.resource().wrap(CUdeviceptr(0), 0) }.unwrap();
    assert!(empty.is_empty());
    empty.close().unwrap();
    backend.require_all_gone();
}

fn an_alias_takes_whole_mappings(backend: &Backend) {
    let resource = backend.resource();
    let range = device_range(backend, &GRANULES);
    let mark = backend.mark();
    let at = |granule: usize| range.address.checked_add(granule * G).unwrap();
    let across = |address, granules: usize| Error::MappingAcross { address, size: (granules * G) as u64 };
    for (begin, granules, expect) in [
        (1, 2, across(at(0), 2)),
        (0, 1, across(at(0), 2)),
        (2, 4, across(at(3), 4)),
        (2, 6, Error::NotVmm { address: at(7) }),
        (7, 1, Error::NotVmm { address: at(7) }),
    ] {
        // SAFETY: it is refused.
        assert_eq!(unsafe { resource.wrap(at(begin), granules * G) }.unwrap_err(), expect);
        backend.require_unchanged(&mark);
    }
    // SAFETY: the memory is the test's, which refers to nothing in it.
    unsafe { resource.wrap(at(2), 5 * G) }.unwrap().close().unwrap();
    backend.require_unchanged(&mark);
    deallocate(&resource, &range, Release::Caller).unwrap();
    backend.require_all_gone();
}

fn what_is_taken_over_and_wrapped_is_counted(backend: &Backend) {
    let resource = backend.resource();
    let range = device_range(backend, &GRANULES);
    let mapped = range.mapped();
    // SAFETY: it is the test's to share.
    let alias = unsafe { resource.wrap(range.address, mapped) }.unwrap();
    let statistics = resource.statistics();
    assert_eq!((statistics.retained.now, statistics.mapped.now, statistics.allocations), (mapped, mapped, 1));
    let before = statistics.reserved.now;
    let buffer = adopt(&resource, &range, Release::Caller).unwrap();
    let statistics = resource.statistics();
    assert_eq!((statistics.retained.now, statistics.mapped.now), (2 * mapped, 2 * mapped));
    assert_eq!((statistics.reserved.now, statistics.physical.peak), (before + range.size, 0));
    assert_eq!((statistics.buffers, statistics.allocations), (2, 2));
    alias.close().unwrap();
    buffer.close().unwrap();
    deallocate(&resource, &device_range(backend, &GRANULES), Release::Caller).unwrap();
    let end = resource.statistics();
    assert_eq!([end.reserved, end.mapped, end.retained].map(|level| level.now), [0; 3]);
    assert_eq!((end.buffers, end.allocations, end.stranded), (0, 2, 0));
}
