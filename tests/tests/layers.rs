//! The lower layers by themselves: allocations, reservations and mappings, and what the driver says of them.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::AsFd;
use std::sync::Arc;

use cuvmm::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
};
use cuvmm::handles::{Allocation, Error, GranularSize, Granularity, Mapping, Reservation};
use cuvmm::{CUresult, Call};
use cuvmm_tests::{Backend, Current, G, MIB, ROOM, Stream, pattern, read_at, steps, write_at};

cuvmm_tests::suite!(
    two_mappings_of_one_allocation_share_its_bytes,
    a_mapping_keeps_what_it_was_made_of,
    what_is_torn_down_goes_in_order,
    a_mapping_without_access_makes_no_call_for_it_and_can_not_be_used,
    read_access_lets_nobody_write,
    an_address_that_is_taken_is_unavailable_and_nothing_is_left,
    a_reservation_is_aligned_as_asked,
    a_size_that_is_not_the_allocations_own_is_refused_by_the_map,
    an_imported_allocation_is_the_same_memory,
    memory_is_what_it_was_made_as,
    a_room_is_free_again_when_its_mapping_is_closed,
    mappings_side_by_side_do_not_mix,
    a_query_about_an_address_answers_for_its_chunk,
    free_memory_moves_with_allocations_alone,
    devices_are_what_they_say,
    handle_kinds_that_are_probed_can_be_made,
);

fn bytes(count: usize) -> GranularSize {
    Granularity::new(G).unwrap().exact(count).unwrap()
}

fn kind(shareable: bool) -> CUmemAllocationHandleType {
    if shareable { CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR } else { CUmemAllocationHandleType::NONE }
}

fn allocate(backend: &Backend, size: usize, shareable: bool) -> Arc<Allocation> {
    let properties = CUmemAllocationProp::pinned(backend.device.location(), kind(shareable));
    Arc::new(Allocation::create(&backend.driver, bytes(size), &properties).unwrap())
}

fn reserve(backend: &Backend, size: usize) -> Arc<Reservation> {
    Arc::new(Reservation::reserve(&backend.driver, bytes(size), 0).unwrap())
}

fn granted(backend: &Backend, flags: CUmemAccess_flags) -> Arc<[CUmemAccessDesc]> {
    Arc::new([CUmemAccessDesc { location: backend.device.location(), flags }])
}

fn map(backend: &Backend, reservation: &Arc<Reservation>, offset: usize, allocation: &Arc<Allocation>) -> Mapping {
    let access = granted(backend, CUmemAccess_flags::READWRITE);
    Mapping::map(reservation, offset, Arc::clone(allocation), access).unwrap()
}

fn two_mappings_of_one_allocation_share_its_bytes(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let (reservation, allocation) = (reserve(backend, 4 * G), allocate(backend, G, false));
    let (one, two) = (map(backend, &reservation, 0, &allocation), map(backend, &reservation, 2 * G, &allocation));
    write_at(&stream, one.address(), &pattern(1, 5000)).unwrap();
    assert!(read_at(&stream, two.address(), 5000).unwrap() == pattern(1, 5000));
    one.close().unwrap();
    write_at(&stream, two.address(), &pattern(2, 5000)).unwrap();
    let again = map(backend, &reservation, 3 * G, &allocation);
    two.close().unwrap();
    assert!(read_at(&stream, again.address(), 5000).unwrap() == pattern(2, 5000));
    again.close().unwrap();
}

fn a_mapping_keeps_what_it_was_made_of(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let mark = backend.mark();
    let (reservation, allocation) = (reserve(backend, G), allocate(backend, G, false));
    let mapping = map(backend, &reservation, 0, &allocation);
    drop((reservation, allocation));
    write_at(&stream, mapping.address(), &pattern(3, 64)).unwrap();
    assert_eq!(read_at(&stream, mapping.address(), 64).unwrap(), pattern(3, 64));
    drop(mapping);
    backend.require_unchanged(&mark);
}

fn what_is_torn_down_goes_in_order(backend: &Backend) {
    for dropped in [false, true] {
        let (reservation, allocation) = (reserve(backend, G), allocate(backend, G, false));
        let mapping = map(backend, &reservation, 0, &allocation);
        drop((reservation, allocation));
        let (steps, ()) = steps(backend, || if dropped { drop(mapping) } else { mapping.close().unwrap() });
        let mut calls: Vec<Call> = steps.iter().map(|step| step.call).collect();
        assert_eq!(calls.remove(0), Call::cuMemUnmap, "before anything that it needs");
        calls.sort_by_key(|call| *call != Call::cuMemRelease);
        assert_eq!(calls, [Call::cuMemRelease, Call::cuMemAddressFree]);
    }
    // A failed grant unmaps before the addresses go.
    let (reservation, allocation) = (reserve(backend, G), allocate(backend, G, false));
    let nobody = CUmemAccessDesc { flags: CUmemAccess_flags(2), ..granted(backend, CUmemAccess_flags::READ)[0] };
    let (steps, error) = steps(backend, || {
        let error = Mapping::map(&reservation, 0, allocation, Arc::new([nobody])).unwrap_err();
        drop(reservation);
        error
    });
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemSetAccess), Some(CUresult::INVALID_VALUE)));
    let calls: Vec<Call> = steps.iter().map(|step| step.call).collect();
    let of = |call: Call| calls.iter().position(|other| *other == call).unwrap();
    assert!(of(Call::cuMemUnmap) < of(Call::cuMemAddressFree), "{calls:?}");
}

fn a_mapping_without_access_makes_no_call_for_it_and_can_not_be_used(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let (reservation, allocation) = (reserve(backend, G), allocate(backend, G, false));
    let (steps, mapping) = steps(backend, || Mapping::map(&reservation, 0, allocation, Arc::new([])).unwrap());
    assert_eq!(steps.iter().map(|step| step.call).collect::<Vec<_>>(), [Call::cuMemMap]);
    let access = backend.driver.mem_get_access(backend.device.location(), mapping.address()).unwrap();
    assert_eq!(access, CUmemAccess_flags(0));
    // The driver's own copies are refused at once, and no harm is done.
    let refused = write_at(&stream, mapping.address(), &[1; 64]).unwrap_err();
    assert_eq!(refused.code(), Some(CUresult::INVALID_VALUE));
    mapping.close().unwrap();
    stream.synchronize().unwrap();
}

fn read_access_lets_nobody_write(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let (reservation, allocation) = (reserve(backend, 2 * G), allocate(backend, G, false));
    let writable = map(backend, &reservation, 0, &allocation);
    let access = granted(backend, CUmemAccess_flags::READ);
    let readable = Mapping::map(&reservation, G, Arc::clone(&allocation), access).unwrap();
    write_at(&stream, writable.address(), &pattern(4, 64)).unwrap();
    assert_eq!(read_at(&stream, readable.address(), 64).unwrap(), pattern(4, 64));
    let refused = write_at(&stream, readable.address(), &[1; 64]).unwrap_err();
    assert_eq!(refused.code(), Some(CUresult::INVALID_VALUE));
    assert_eq!(read_at(&stream, writable.address(), 64).unwrap(), pattern(4, 64));
    for mapping in [writable, readable] {
        mapping.close().unwrap();
    }
}

fn an_address_that_is_taken_is_unavailable_and_nothing_is_left(backend: &Backend) {
    let reservation = reserve(backend, ROOM);
    let mark = backend.mark();
    let error = Reservation::at(&backend.driver, bytes(ROOM), reservation.address()).unwrap_err();
    assert!(matches!(error, Error::AddressUnavailable { wanted, .. } if wanted == reservation.address()), "{error}");
    backend.require_unchanged(&mark);
    let address = reservation.address();
    drop(reservation);
    let again = Reservation::at(&backend.driver, bytes(ROOM), address).unwrap();
    assert_eq!(again.address(), address);
    again.close().unwrap();
}

fn a_reservation_is_aligned_as_asked(backend: &Backend) {
    for alignment in [0, G, 64 * MIB, 1 << 30, 1 << 40] {
        let reservation = Reservation::reserve(&backend.driver, bytes(3 * G), alignment).unwrap();
        assert_eq!(reservation.address().0 % alignment.max(G) as u64, 0, "{alignment:#x}");
        assert_eq!(reservation.size(), 3 * G);
        reservation.close().unwrap();
    }
}

fn a_size_that_is_not_the_allocations_own_is_refused_by_the_map(backend: &Backend) {
    let allocation = allocate(backend, 2 * G, true);
    let file = allocation.export_posix_fd().unwrap();
    let reservation = reserve(backend, 8 * G);
    for size in [G, 3 * G, 4 * G] {
        let mark = backend.mark();
        let lying = Arc::new(Allocation::import_posix_fd(&backend.driver, file.as_fd(), bytes(size)).unwrap());
        let access = granted(backend, CUmemAccess_flags::READWRITE);
        let error = Mapping::map(&reservation, 0, lying, access).unwrap_err();
        assert_eq!((error.call(), error.code()), (Some(Call::cuMemMap), Some(CUresult::NOT_SUPPORTED)));
        backend.require_unchanged(&mark);
    }
    // The room is free for the one that is true.
    map(backend, &reservation, 0, &allocation).close().unwrap();
}

fn an_imported_allocation_is_the_same_memory(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let allocation = allocate(backend, G, true);
    let file = allocation.export_posix_fd().unwrap();
    let imported = Arc::new(Allocation::import_posix_fd(&backend.driver, file.as_fd(), bytes(G)).unwrap());
    drop(file);
    assert_ne!(imported.handle(), allocation.handle());
    let properties = imported.properties().unwrap();
    assert_eq!(properties.location, backend.device.location());
    assert_eq!(properties.requested_handle_types, CUmemAllocationHandleType::NONE);
    assert_eq!(backend.require_no_call(|| imported.export_posix_fd().unwrap_err()), Error::Imported);
    let reservation = reserve(backend, 2 * G);
    let (one, two) = (map(backend, &reservation, 0, &allocation), map(backend, &reservation, G, &imported));
    write_at(&stream, one.address(), &pattern(5, 64)).unwrap();
    drop((one, allocation));
    assert_eq!(read_at(&stream, two.address(), 64).unwrap(), pattern(5, 64));
    two.close().unwrap();
}

fn memory_is_what_it_was_made_as(backend: &Backend) {
    for shareable in [false, true] {
        let allocation = allocate(backend, G, shareable);
        let properties = allocation.properties().unwrap();
        assert_eq!(properties.location, backend.device.location());
        assert_eq!(properties.requested_handle_types, kind(shareable));
        let exported = allocation.export_posix_fd();
        assert_eq!(exported.is_ok(), shareable);
    }
    let properties = CUmemAllocationProp::pinned(backend.device.location(), kind(false));
    assert_eq!(Granularity::minimum(&backend.driver, &properties).unwrap().bytes(), G);
    let recommended = Granularity::recommended(&backend.driver, &properties).unwrap().bytes();
    assert_eq!(recommended % G, 0);
}

fn a_room_is_free_again_when_its_mapping_is_closed(backend: &Backend) {
    let (reservation, allocation) = (reserve(backend, 2 * G), allocate(backend, 2 * G, false));
    for _ in 0..3 {
        let mapping = map(backend, &reservation, 0, &allocation);
        let error = backend
            .require_no_call(|| Mapping::map(&reservation, 0, Arc::clone(&allocation), Arc::new([])).unwrap_err());
        assert_eq!(error, Error::AlreadyMapped { offset: 0, size: 2 * G });
        mapping.close().unwrap();
    }
}

fn mappings_side_by_side_do_not_mix(backend: &Backend) {
    let stream = Stream::non_blocking(&backend.device);
    let reservation = reserve(backend, 4 * G);
    let mappings: Vec<Mapping> =
        (0..4).map(|index| map(backend, &reservation, index * G, &allocate(backend, G, false))).collect();
    for (seed, mapping) in (0..).zip(&mappings) {
        write_at(&stream, mapping.address(), &pattern(seed, 4096)).unwrap();
    }
    // One is taken away from the middle.
    let mut mappings = mappings;
    mappings.remove(1).close().unwrap();
    for (seed, mapping) in [0, 2, 3].into_iter().zip(&mappings) {
        assert!(read_at(&stream, mapping.address(), 4096).unwrap() == pattern(seed, 4096));
    }
    let refused = read_at(&stream, reservation.address().checked_add(G).unwrap(), 64).unwrap_err();
    assert_eq!(refused.code(), Some(CUresult::INVALID_VALUE));
}

fn a_query_about_an_address_answers_for_its_chunk(backend: &Backend) {
    let _current = Current::push(&backend.device);
    let buffer = backend.resource().allocate_with_capacity(G, 8 * G).unwrap().grow_into(3 * G).unwrap();
    for chunk in buffer.chunks() {
        for inside in [0, 1, chunk.size - 1] {
            let address = chunk.address.checked_add(inside).unwrap();
            let range = backend.driver.mem_get_address_range(address).unwrap();
            assert_eq!(range, (chunk.address, chunk.size));
        }
    }
    let end = buffer.address().checked_add(buffer.size()).unwrap();
    assert!(backend.driver.mem_get_address_range(end).is_err(), "reserved and not mapped");
    buffer.close().unwrap();
}

fn free_memory_moves_with_allocations_alone(backend: &Backend) {
    let _current = Current::push(&backend.device);
    let free = || backend.driver.mem_get_info().unwrap().free;
    let before = free();
    let reservation = Reservation::reserve(&backend.driver, bytes(1 << 40), 0).unwrap();
    assert_eq!(free(), before, "addresses cost no memory");
    let allocation = allocate(backend, 64 * MIB, true);
    assert_eq!(free(), before - 64 * MIB);
    let file = allocation.export_posix_fd().unwrap();
    drop(allocation);
    assert_eq!(free(), before - 64 * MIB, "a file keeps it");
    drop(file);
    assert_eq!(free(), before);
    drop(reservation);
}

fn devices_are_what_they_say(backend: &Backend) {
    let driver = &backend.driver;
    assert!(driver.version().0 >= 11_000, "{}", driver.version());
    let devices = driver.devices();
    assert_eq!(devices.len(), usize::try_from(driver.device_count()).unwrap());
    let mut uuids = Vec::new();
    for device in &devices {
        let uuid = device.uuid().unwrap();
        assert_ne!(uuid.bytes, [0; 16]);
        assert_eq!(driver.device_by_uuid(uuid).unwrap().as_ref(), Some(device));
        assert!(!device.name().unwrap().is_empty());
        assert!(device.total_memory().unwrap() >= 1 << 30);
        assert!(device.compute_capability().unwrap().major >= 6);
        assert!(device.supports_virtual_memory().unwrap());
        let attribute = CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        assert_eq!(device.attribute(attribute).unwrap(), Some(1));
        uuids.push(uuid.bytes);
    }
    uuids.sort_unstable();
    uuids.dedup();
    assert_eq!(uuids.len(), devices.len());
    // The same facts by another driver of the same machine.
    let other = backend.another();
    assert_eq!(other.device.uuid().unwrap(), backend.device.uuid().unwrap());
    assert_ne!(other.driver, backend.driver);
    other.finish();
}

fn handle_kinds_that_are_probed_can_be_made(backend: &Backend) {
    let kinds = [
        CUmemAllocationHandleType::NONE,
        CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR,
        CUmemAllocationHandleType::FABRIC,
    ];
    for kind in kinds {
        let mark = backend.mark();
        let probe = backend.device.probe(kind);
        let properties = CUmemAllocationProp::pinned(backend.device.location(), kind);
        let created = Allocation::create(&backend.driver, bytes(G), &properties);
        // What was found out says what happens, whatever attributes promise.
        assert_eq!(probe.is_available(), created.is_ok(), "{kind:?}: {probe:?}, {:?}", created.err());
        drop(created);
        backend.require_unchanged(&mark);
        backend.require_no_call(|| backend.device.probe(kind));
    }
    assert!(backend.device.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR).is_available());
}
