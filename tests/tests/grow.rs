//! Growing: covered, in place or moved, and what it keeps.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::{Call, Options, Outcome, Release, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{
    Backend, G, MIB, ROOM, Step, bytes_of, occupy_behind, pattern, require_marks, steps, with_room_behind, write_marks,
};

cuvmm_tests::suite!(
    a_first_allocation_is_four_calls_and_so_is_the_next,
    sizes_are_rounded_up_to_the_granularity,
    a_grow_within_the_capacity_keeps_the_address_and_is_three_calls,
    a_grow_behind_the_reservation_keeps_the_address,
    a_grow_across_the_capacity_adds_two_chunks,
    a_grow_that_moves_keeps_every_chunk_and_copies_nothing,
    a_grow_to_less_or_the_same_is_covered_without_a_call,
    an_alias_shares_its_bytes_both_ways,
    an_aligned_buffer_grows_in_place_and_stays_aligned,
    an_aligned_buffer_that_moves_is_aligned_again,
    the_room_at_the_end_belongs_to_one_alias_and_comes_back,
    growing_a_shorter_alias_does_not_touch_what_another_added,
    an_empty_buffer_needs_no_call,
    an_empty_buffer_grows_into_its_capacity,
    an_empty_buffer_without_capacity_grows_by_allocating,
    more_capacity_than_there_are_addresses_is_less,
    grow_into_keeps_the_bytes_by_every_way,
    grow_into_gives_the_old_addresses_back,
    buffers_of_a_moved_range_close_in_any_order,
    a_buffer_outlives_its_resource,
    ids_are_shared_by_a_family_and_generations_rise,
);

fn calls(steps: &[Step]) -> Vec<Call> {
    steps.iter().map(|step| step.call).collect()
}

fn chunk_sizes(buffer: &VirtualMemoryBuffer) -> Vec<usize> {
    buffer.chunks().iter().map(|chunk| chunk.size).collect()
}

/// Demands that the chunks lie one behind the other from the address on, and cover the size.
#[track_caller]
fn require_contiguous(buffer: &VirtualMemoryBuffer) {
    let mut at = buffer.address().0;
    for chunk in buffer.chunks() {
        assert_eq!(chunk.address.0, at);
        at += chunk.size as u64;
    }
    assert!(at >= buffer.address().0 + buffer.size() as u64);
}

fn a_first_allocation_is_four_calls_and_so_is_the_next(backend: &Backend) {
    let resource = backend.resource();
    let expected = [Call::cuMemAddressReserve, Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess];
    for _ in 0..3 {
        let (steps, buffer) = steps(backend, || resource.allocate(G).unwrap());
        assert_eq!(calls(&steps), expected);
        buffer.close().unwrap();
    }
}

fn sizes_are_rounded_up_to_the_granularity(backend: &Backend) {
    let resource = backend.resource();
    assert_eq!(resource.granularity().bytes(), G);
    for (asked, size) in [(1, G), (128, G), (6912, G), (G - 1, G), (G, G), (G + 1, 2 * G), (5 * MIB, 3 * G)] {
        let created = backend.watch(Call::cuMemCreate);
        let mapped = backend.watch(Call::cuMemMap);
        let buffer = resource.allocate(asked).unwrap();
        assert_eq!(buffer.size(), size);
        assert_eq!(created.take_pairs()[0].1, size as u64);
        assert_eq!(mapped.take_pairs(), [(buffer.address().0, size as u64)]);
        buffer.copy_from_host(size - 1, &[1]).unwrap();
        buffer.close().unwrap();
    }
}

fn a_grow_within_the_capacity_keeps_the_address_and_is_three_calls(backend: &Backend) {
    let buffer = backend.resource().allocate_with_capacity(G, 16 * G).unwrap();
    assert!(buffer.capacity() >= 16 * G);
    write_marks(&buffer, 1);
    let granted = backend.watch(Call::cuMemSetAccess);
    let (steps, grown) = steps(backend, || buffer.grow(3 * G).unwrap());
    assert_eq!(calls(&steps), [Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess]);
    // Access is granted to whole mappings alone, so that drivers which know no parts are content.
    assert_eq!(granted.take_pairs(), [(buffer.address().0 + G as u64, 2 * G as u64)]);
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
    assert_eq!((grown.size(), buffer.size()), (3 * G, G));
    require_contiguous(&grown);
    require_marks(&grown, 1, G);
    write_marks(&grown, 2);
    require_marks(&buffer, 2, G);
    buffer.close().unwrap();
    require_marks(&grown, 2, 3 * G);
    grown.close().unwrap();
}

fn a_grow_behind_the_reservation_keeps_the_address(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), ROOM);
    let (first, capacity) = (buffer.address().0, buffer.capacity());
    assert_eq!(capacity, ROOM);
    write_marks(&buffer, 1);
    let freed = backend.watch(Call::cuMemAddressFree);
    let unmapped = backend.watch(Call::cuMemUnmap);
    let grown = buffer.grow(ROOM + 2 * G).unwrap();
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
    assert_eq!(chunk_sizes(&grown), [ROOM, 2 * G]);
    require_contiguous(&grown);
    require_marks(&grown, 1, ROOM);
    grown.copy_from_host(ROOM, &[5; 4096]).unwrap();
    buffer.close().unwrap();
    assert_eq!((freed.take_pairs(), unmapped.take_pairs()), (vec![], vec![]));
    require_marks(&grown, 1, ROOM);
    grown.close().unwrap();
    // Mapping by mapping, and each reservation by its own pair.
    let end = first + ROOM as u64;
    assert_eq!(unmapped.take_pairs(), [(end, 2 * G as u64), (first, ROOM as u64)]);
    let pairs = freed.take_pairs();
    assert_eq!(pairs.iter().map(|pair| pair.0).collect::<Vec<_>>(), [end, first]);
    assert_eq!(pairs[1].1, ROOM as u64);
}

fn a_grow_across_the_capacity_adds_two_chunks(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), G);
    let capacity = buffer.capacity();
    write_marks(&buffer, 1);
    let grown = buffer.grow(capacity + G).unwrap();
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
    assert_eq!(chunk_sizes(&grown), [G, capacity - G, G]);
    require_contiguous(&grown);
    require_marks(&grown, 1, G);
    write_marks(&grown, 2);
    require_marks(&buffer, 2, G);
    grown.close().unwrap();
    require_marks(&buffer, 2, G);
    buffer.close().unwrap();
}

fn a_grow_that_moves_keeps_every_chunk_and_copies_nothing(backend: &Backend) {
    let resource = backend.resource();
    let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap().grow_into(4 * G).unwrap();
    write_marks(&buffer, 1);
    let occupied = occupy_behind(&buffer);
    let (steps, moved) = steps(backend, || buffer.grow(buffer.capacity() + G).unwrap());
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    assert_ne!(moved.address(), buffer.address());
    let created = steps.iter().filter(|step| step.call == Call::cuMemCreate).count();
    assert_eq!(created, 1, "only what is new is made");
    assert!(steps.iter().all(|step| !step.call.to_string().contains("cpy")), "{steps:?}");
    assert_eq!(chunk_sizes(&moved)[..3], [G, 2 * G, G]);
    require_contiguous(&moved);
    require_marks(&moved, 1, 4 * G);
    // Both name the same bytes, and the old one is as it was.
    write_marks(&moved, 2);
    require_marks(&buffer, 2, 4 * G);
    assert_eq!((buffer.size(), chunk_sizes(&buffer)), (4 * G, vec![G, 2 * G, G]));
    buffer.close().unwrap();
    require_marks(&moved, 2, moved.size());
    // What moved moves again.
    let occupied = occupy_behind(&moved);
    let again = moved.grow(moved.capacity() + G).unwrap();
    drop(occupied);
    assert_eq!(again.outcome(), Some(Outcome::Moved));
    require_marks(&again, 2, moved.size());
    moved.close().unwrap();
    again.close().unwrap();
}

fn a_grow_to_less_or_the_same_is_covered_without_a_call(backend: &Backend) {
    let buffer = backend.resource().allocate(3 * G).unwrap();
    write_marks(&buffer, 1);
    for size in [0, 1, G, 2 * G + 1, 3 * G - 1, 3 * G] {
        let alias = backend.require_no_call(|| buffer.grow(size).unwrap());
        assert_eq!((alias.outcome(), alias.size()), (Some(Outcome::Covered), 3 * G));
        assert_eq!(alias.address(), buffer.address());
        require_marks(&alias, 1, 3 * G);
        alias.set_release(Release::Caller).unwrap();
        let mark = backend.mark();
        alias.close().unwrap();
        backend.require_unchanged(&mark);
    }
    let same = backend.require_no_call(|| buffer.grow_into(G).unwrap());
    assert_eq!((same.outcome(), same.size()), (Some(Outcome::Covered), 3 * G));
    require_marks(&same, 1, 3 * G);
    same.close().unwrap();
}

fn an_alias_shares_its_bytes_both_ways(backend: &Backend) {
    let buffer = backend.resource().allocate(2 * G).unwrap();
    let alias = buffer.grow(2 * G).unwrap();
    buffer.copy_from_host(G - 17, &pattern(1, 40)).unwrap();
    let mut seen = [0; 40];
    alias.copy_to_host(G - 17, &mut seen).unwrap();
    assert_eq!(seen[..], pattern(1, 40)[..]);
    alias.fill(0, 2 * G, 0x5a).unwrap();
    assert!(bytes_of(&buffer).iter().all(|byte| *byte == 0x5a));
    buffer.close().unwrap();
    assert!(bytes_of(&alias).iter().all(|byte| *byte == 0x5a));
    alias.close().unwrap();
}

fn aligned(backend: &Backend, alignment: usize) -> VirtualMemoryResource {
    VirtualMemoryResource::new(&backend.device, Options::new().alignment(alignment)).unwrap()
}

fn an_aligned_buffer_grows_in_place_and_stays_aligned(backend: &Backend) {
    for alignment in [16 * MIB, 64 * MIB, 1 << 30] {
        let buffer = with_room_behind(&aligned(backend, alignment), G);
        assert_eq!(buffer.address().0 % alignment as u64, 0);
        write_marks(&buffer, 1);
        // The end is not aligned, and need not be.
        let grown = buffer.grow(buffer.capacity() + G).unwrap();
        assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
        require_marks(&grown, 1, G);
        grown.close().unwrap();
        buffer.close().unwrap();
    }
}

fn an_aligned_buffer_that_moves_is_aligned_again(backend: &Backend) {
    let buffer = aligned(backend, 256 * MIB).allocate(G).unwrap();
    write_marks(&buffer, 1);
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    assert_eq!(moved.outcome(), Some(Outcome::Moved));
    assert_eq!(moved.address().0 % (256 * MIB) as u64, 0);
    require_marks(&moved, 1, G);
    moved.close().unwrap();
}

fn the_room_at_the_end_belongs_to_one_alias_and_comes_back(backend: &Backend) {
    let buffer = backend.resource().allocate_with_capacity(G, 8 * G).unwrap();
    write_marks(&buffer, 1);
    let first = buffer.grow(2 * G).unwrap();
    assert_eq!(first.outcome(), Some(Outcome::InPlace));
    first.copy_from_host(G, &pattern(9, 4096)).unwrap();
    // The room is the first one's now: a second grow of the same buffer moves, and has a tail of its own.
    let second = buffer.grow(2 * G).unwrap();
    assert_eq!(second.outcome(), Some(Outcome::Moved));
    require_marks(&second, 1, G);
    second.copy_from_host(G, &pattern(7, 4096)).unwrap();
    let mut seen = vec![0; 4096];
    first.copy_to_host(G, &mut seen).unwrap();
    assert_eq!(seen, pattern(9, 4096));
    // It grows on where it is, and the first one too.
    let longer = first.grow(3 * G).unwrap();
    assert_eq!(longer.outcome(), Some(Outcome::InPlace));
    longer.close().unwrap();
    first.close().unwrap();
    let third = buffer.grow(2 * G).unwrap();
    assert_eq!((third.outcome(), third.address()), (Some(Outcome::InPlace), buffer.address()));
    for buffer in [second, buffer, third] {
        require_marks(&buffer, 1, G);
        buffer.close().unwrap();
    }
}

fn growing_a_shorter_alias_does_not_touch_what_another_added(backend: &Backend) {
    let first = backend.resource().allocate_with_capacity(G, 8 * G).unwrap();
    let second = first.grow(2 * G).unwrap();
    write_marks(&second, 3);
    // What another alias added behind is not the first one's.
    let other = first.grow(2 * G).unwrap();
    assert_eq!(other.outcome(), Some(Outcome::Moved));
    other.fill(G, G, 0).unwrap();
    require_marks(&second, 3, 2 * G);
    // The longer one goes first, and takes with it just the chunk that it added.
    let unmapped = backend.watch(Call::cuMemUnmap);
    let end = first.address().0 + G as u64;
    second.close().unwrap();
    assert_eq!(unmapped.take_pairs(), [(end, G as u64)]);
    require_marks(&first, 3, G);
    first.close().unwrap();
    other.close().unwrap();
}

fn an_empty_buffer_needs_no_call(backend: &Backend) {
    let resource = backend.resource();
    backend.require_no_call(|| {
        let empty = resource.allocate(0).unwrap();
        assert_eq!((empty.size(), empty.capacity(), empty.chunks().len()), (0, 0, 0));
        assert!(empty.is_empty());
        empty.copy_from_host(0, &[]).unwrap();
        empty.copy_to_host(0, &mut []).unwrap();
        empty.fill(0, 0, 1).unwrap();
        let alias = empty.grow(0).unwrap();
        assert_eq!(alias.outcome(), Some(Outcome::Covered));
        alias.close().unwrap();
        drop(resource.allocate(0).unwrap());
        empty.grow_into(0).unwrap().close().unwrap();
    });
}

fn an_empty_buffer_grows_into_its_capacity(backend: &Backend) {
    let empty = backend.resource().allocate_with_capacity(0, 4 * G).unwrap();
    assert!(empty.is_empty() && empty.address().0 != 0 && empty.capacity() >= 4 * G);
    let address = empty.address();
    let grown = empty.grow(2 * G).unwrap();
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), address));
    write_marks(&grown, 6);
    empty.close().unwrap();
    let grown = grown.grow_into(4 * G).unwrap();
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), address));
    require_marks(&grown, 6, 2 * G);
    grown.close().unwrap();
    let mark = backend.mark();
    drop(backend.resource().allocate_with_capacity(0, 4 * G).unwrap());
    backend.require_unchanged(&mark);
}

fn an_empty_buffer_without_capacity_grows_by_allocating(backend: &Backend) {
    let resource = backend.resource();
    let empty = resource.allocate(0).unwrap();
    let (steps, grown) = steps(backend, || empty.grow(G).unwrap());
    assert_eq!(calls(&steps), [Call::cuMemAddressReserve, Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess]);
    write_marks(&grown, 6);
    require_marks(&grown, 6, G);
    assert_eq!(grown.resource(), &resource);
    grown.close().unwrap();
    empty.close().unwrap();
}

fn more_capacity_than_there_are_addresses_is_less(backend: &Backend) {
    for capacity in [1 << 50, usize::MAX] {
        let buffer = backend.resource().allocate_with_capacity(G, capacity).unwrap();
        assert!(buffer.capacity() < capacity && buffer.capacity() >= 1 << 40, "{:#x}", buffer.capacity());
        let grown = buffer.grow(ROOM + G).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        assert_eq!(grown.chunks().len(), 2);
        grown.close().unwrap();
        buffer.close().unwrap();
    }
}

fn grow_into_keeps_the_bytes_by_every_way(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), G);
    write_marks(&buffer, 8);
    let id = buffer.id();
    let buffer = buffer.grow_into(1).unwrap();
    assert_eq!(buffer.outcome(), Some(Outcome::Covered));
    let buffer = buffer.grow_into(2 * G).unwrap();
    assert_eq!(buffer.outcome(), Some(Outcome::InPlace));
    let past = buffer.capacity() + G;
    let buffer = buffer.grow_into(past).unwrap();
    assert_eq!(buffer.outcome(), Some(Outcome::InPlace));
    let (address, past) = (buffer.address(), buffer.capacity() + G);
    let occupied = occupy_behind(&buffer);
    let buffer = buffer.grow_into(past).unwrap();
    drop(occupied);
    assert_eq!((buffer.outcome(), buffer.id()), (Some(Outcome::Moved), id));
    assert_ne!(buffer.address(), address);
    require_marks(&buffer, 8, G);
    buffer.close().unwrap();
}

fn grow_into_gives_the_old_addresses_back(backend: &Backend) {
    let mark = backend.mark();
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let occupied = occupy_behind(&buffer);
    let moved = buffer.grow_into(ROOM + G).unwrap();
    drop(occupied);
    let live = backend.live();
    assert_eq!((live.reservations, live.mappings, live.allocations), (1, 2, 2));
    moved.close().unwrap();
    backend.require_unchanged(&mark);
}

fn buffers_of_a_moved_range_close_in_any_order(backend: &Backend) {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mark = backend.mark();
        let resource = backend.resource();
        let first = resource.allocate(G).unwrap();
        let second = first.grow(2 * G).unwrap();
        let occupied = occupy_behind(&second);
        let third = second.grow(second.capacity() + G).unwrap();
        drop((occupied, resource));
        let freed = backend.watch(Call::cuMemAddressFree);
        let mut buffers = [Some(first), Some(second), Some(third)];
        for index in order {
            let buffer = buffers[index].take().unwrap();
            buffer.set_release(Release::Caller).unwrap();
            buffer.close().unwrap();
        }
        assert_eq!(freed.take_pairs().len(), 2, "{order:?}");
        backend.require_unchanged(&mark);
    }
}

fn a_buffer_outlives_its_resource(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    write_marks(&buffer, 2);
    let buffer = buffer.grow_into(2 * G).unwrap();
    require_marks(&buffer, 2, G);
    buffer.close().unwrap();
}

fn ids_are_shared_by_a_family_and_generations_rise(backend: &Backend) {
    let resource = backend.resource();
    let (one, other) = (resource.allocate(G).unwrap(), resource.allocate(G).unwrap());
    assert_ne!(one.id(), other.id());
    let grown = one.grow(2 * G).unwrap();
    assert_eq!(grown.id(), one.id());
    assert!(grown.generation() > one.generation());
    let again = grown.grow(1).unwrap();
    assert!(again.generation() > grown.generation());
    for buffer in [one, other, grown, again] {
        buffer.close().unwrap();
    }
}
