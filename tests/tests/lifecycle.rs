//! What NVIDIA's design wants tested of its resource, from the first allocation to the last close, which leaves nothing
//! by the driver's own word: each test ends with asking for all that it used.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;
use std::time::{Duration, Instant};

use cuvmm::handles::Reservation;
use cuvmm::{Call, Options, Outcome, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_tests::{
    Backend, G, MIB, ROOM, Ranges, Remains, occupy_behind, pattern, require_marks, with_room_behind, write_marks,
};

cuvmm_tests::suite!(
    what_remains_is_found_and_what_is_gone_is_not,
    addresses_that_are_somebody_elses_meanwhile_are_waited_for,
    rounds_of_allocate_and_close_leave_nothing,
    rounds_of_allocate_grow_and_close_leave_nothing,
    buffers_of_a_grow_in_place_close_in_either_order,
    buffers_of_an_aligned_grow_in_place_close_in_either_order,
    buffers_of_a_grow_that_moves_close_in_either_order_and_free_exactly_their_own,
    sizes_of_no_granularity_grow_and_close,
    a_second_grow_of_the_same_buffer_has_memory_of_its_own,
    a_shorter_alias_grows_without_the_longer_ones_memory,
    memory_is_gone_at_close_though_lists_and_the_resource_live,
    what_is_written_through_one_alias_is_read_through_the_other,
);

/// Which of two buffers closes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Old,
    New,
}

const EITHER: [First; 2] = [First::Old, First::New];

fn reserve(backend: &Backend, bytes: usize) -> Reservation {
    Reservation::reserve(&backend.driver, Reservation::GRANULARITY.round_up(bytes).unwrap(), 0).unwrap()
}

fn pair(reservation: &Reservation) -> (u64, usize) {
    (reservation.address().0, reservation.size())
}

/// Closes the one, demands that the other holds marks 1 in its first `kept` bytes, and closes that.
fn close_both(first: First, old: VirtualMemoryBuffer, new: VirtualMemoryBuffer, kept: usize) {
    let (one, other) = if first == First::Old { (old, new) } else { (new, old) };
    one.close().unwrap();
    require_marks(&other, 1, kept);
    other.close().unwrap();
}

fn what_remains_is_found_and_what_is_gone_is_not(backend: &Backend) {
    // A buffer that lives is as good as one that was lost.
    let buffer = backend.resource().allocate(3 * G).unwrap();
    let ranges = Ranges::of(&buffer);
    let (mapping, reservation) = ((buffer.address().0, 3 * G), (buffer.address().0, buffer.capacity()));
    assert_eq!(backend.used(), ranges);
    assert_eq!(
        backend.remains(&ranges),
        [Remains::Mapping(mapping.0, mapping.1), Remains::Reservation(reservation.0, reservation.1)]
    );
    buffer.close().unwrap();
    assert_eq!(backend.remains(&ranges), []);

    // The addresses of what is gone may be among those that are made now.
    let earlier = backend.used();
    let empty = reserve(backend, 2 * ROOM);
    let (address, size) = pair(&empty);
    assert_eq!(backend.remains(&backend.used().without(&earlier)), [Remains::Reservation(address, size)]);
    empty.close().unwrap();
    // One that nobody has, and that is too small for a hint to tell of it.
    let earlier = backend.used();
    let lost = backend.driver.mem_address_reserve(G, 0, Default::default()).unwrap();
    assert_eq!(backend.remains(&backend.used().without(&earlier)), [Remains::Reservation(lost.0, G)]);
    // It was freed by that.
    let unknown = backend.ledger.log();
    assert!(unknown.iter().any(|made| made.call == Call::cuMemAddressFree && made.arguments == [lost.0, G as u64]));
    backend.require_all_gone();
}

fn addresses_that_are_somebody_elses_meanwhile_are_waited_for(backend: &Backend) {
    let buffer = backend.resource().allocate(G).unwrap();
    let ranges = Ranges::of(&buffer);
    let (address, size) = *ranges.reservations.first().unwrap();
    buffer.close().unwrap();
    let other = backend.another();
    let size = Reservation::GRANULARITY.exact(size).unwrap();
    let taken = Reservation::at(&other.driver, size, cuvmm::driver::sys::CUdeviceptr(address)).unwrap();
    let start = Instant::now();
    let delay = Duration::from_millis(50);
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(delay);
            taken.close().unwrap();
        });
        backend.require_gone(&ranges);
    });
    assert!(start.elapsed() >= delay, "the addresses were somebody else's");
    other.finish();
    backend.require_all_gone();
}

fn rounds_of_allocate_and_close_leave_nothing(backend: &Backend) {
    let resource = backend.resource();
    let mark = backend.mark();
    for _ in 0..64 {
        resource.allocate(64 * MIB).unwrap().close().unwrap();
        backend.require_unchanged(&mark);
    }
    assert_eq!(backend.used().mappings.first().map(|mapping| mapping.1), Some(64 * MIB));
    backend.require_all_gone();
}

fn rounds_of_allocate_grow_and_close_leave_nothing(backend: &Backend) {
    let resource = backend.resource();
    let mark = backend.mark();
    for round in 0..64 {
        let buffer = resource.allocate(64 * MIB).unwrap();
        // Every second one moves.
        let occupied = (round % 2 == 1).then(|| occupy_behind(&buffer));
        let grown = buffer.grow(96 * MIB).unwrap();
        drop(occupied);
        assert_eq!((grown.size(), grown.chunks().len()), (96 * MIB, 2));
        let (one, other) = if round % 4 < 2 { (buffer, grown) } else { (grown, buffer) };
        one.close().unwrap();
        other.close().unwrap();
        backend.require_unchanged(&mark);
    }
    backend.require_all_gone();
}

fn grow_in_place(backend: &Backend, resource: &VirtualMemoryResource) {
    for first in EITHER {
        let buffer = with_room_behind(resource, G);
        write_marks(&buffer, 1);
        let grown = buffer.grow(buffer.capacity() + G).unwrap();
        assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
        let (short, long) = (Ranges::of(&buffer), Ranges::of(&grown));
        assert_eq!((short.mappings.len(), long.mappings.len(), long.reservations.len()), (1, 3, 2));
        if first == First::New {
            // What it added goes with it, and nothing else.
            grown.close().unwrap();
            let added = long.clone().without(&short);
            backend.require_gone(&added);
            assert_eq!(backend.remains(&long).len(), 2, "the first buffer's");
            require_marks(&buffer, 1, G);
            buffer.close().unwrap();
        } else {
            close_both(first, buffer, grown, G);
        }
        backend.require_gone(&long);
    }
    backend.require_all_gone();
}

fn buffers_of_a_grow_in_place_close_in_either_order(backend: &Backend) {
    grow_in_place(backend, &backend.resource());
}

fn buffers_of_an_aligned_grow_in_place_close_in_either_order(backend: &Backend) {
    let options = Options::new().alignment(64 * MIB);
    let resource = VirtualMemoryResource::new(&backend.device, options).unwrap();
    let buffer = resource.allocate(G).unwrap();
    assert_eq!(buffer.address().0 % (64 * MIB) as u64, 0);
    buffer.close().unwrap();
    grow_in_place(backend, &resource);
}

fn buffers_of_a_grow_that_moves_close_in_either_order_and_free_exactly_their_own(backend: &Backend) {
    let resource = backend.resource();
    for first in EITHER {
        let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap();
        write_marks(&buffer, 1);
        let occupied = occupy_behind(&buffer);
        let moved = buffer.grow(ROOM + G).unwrap();
        drop(occupied);
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        let (old, new) = (Ranges::of(&buffer), Ranges::of(&moved));
        assert_eq!((old.mappings.len(), new.mappings.len()), (2, 3));
        assert!(old.reservations.is_disjoint(&new.reservations) && old.mappings.is_disjoint(&new.mappings));

        let calls = [Call::cuMemUnmap, Call::cuMemAddressFree];
        let close = |buffer: VirtualMemoryBuffer| {
            let [unmapped, freed] = calls.map(|call| backend.watch(call));
            let released = backend.ledger.count(Call::cuMemRelease);
            buffer.close().unwrap();
            let released = backend.ledger.count(Call::cuMemRelease) - released;
            (Ranges { mappings: unmapped.take_ranges(), reservations: freed.take_ranges() }, released)
        };
        let (one, other) = if first == First::Old { (buffer, moved) } else { (moved, buffer) };
        let (gone, kept) = if first == First::Old { (old, new) } else { (new, old) };
        // Both map the first two chunks; the third is the moved one's alone.
        let alone = usize::from(first == First::New);
        assert_eq!(close(one), (gone.clone(), alone));
        backend.require_gone(&gone);
        assert_eq!(backend.remains(&kept).len(), kept.mappings.len() + kept.reservations.len());
        require_marks(&other, 1, 3 * G);
        assert_eq!(close(other), (kept.clone(), 3 - alone));
        backend.require_gone(&kept);
    }
    backend.require_all_gone();
}

fn sizes_of_no_granularity_grow_and_close(backend: &Backend) {
    let buffer = backend.resource().allocate(2 * MIB).unwrap();
    write_marks(&buffer, 1);
    let grown = buffer.grow(3 * MIB + 1).unwrap();
    assert_eq!(grown.size(), 4 * MIB);
    let again = grown.grow(9 * MIB - 7).unwrap();
    assert_eq!((again.size(), again.chunks().len()), (10 * MIB, 3));
    require_marks(&again, 1, 2 * MIB);
    for buffer in [grown, again, buffer] {
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}

fn a_second_grow_of_the_same_buffer_has_memory_of_its_own(backend: &Backend) {
    for first in EITHER {
        let buffer = backend.resource().allocate(G).unwrap();
        write_marks(&buffer, 1);
        let (one, two) = (buffer.grow(2 * G).unwrap(), buffer.grow(2 * G).unwrap());
        assert_eq!((one.outcome(), two.outcome()), (Some(Outcome::InPlace), Some(Outcome::Moved)));
        // The first chunk is the same memory three times, the second is each one's own.
        one.fill(G, G, 1).unwrap();
        two.fill(G, G, 2).unwrap();
        let mut seen = [0; 16];
        one.copy_to_host(2 * G - 16, &mut seen).unwrap();
        assert_eq!(seen, [1; 16]);
        buffer.close().unwrap();
        close_both(first, one, two, G);
    }
    backend.require_all_gone();
}

fn a_shorter_alias_grows_without_the_longer_ones_memory(backend: &Backend) {
    for first in EITHER {
        let short = backend.resource().allocate_with_capacity(G, 8 * G).unwrap();
        write_marks(&short, 1);
        let long = short.grow(2 * G).unwrap();
        long.fill(G, G, 5).unwrap();
        let grown = short.grow(3 * G).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::Moved));
        grown.fill(G, 2 * G, 6).unwrap();
        let mut seen = [0; 16];
        long.copy_to_host(G, &mut seen).unwrap();
        assert_eq!(seen, [5; 16]);
        close_both(first, long, grown, G);
        require_marks(&short, 1, G);
        // The room behind it is its own again.
        let grown = short.grow_into(2 * G).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        grown.close().unwrap();
    }
    backend.require_all_gone();
}

fn memory_is_gone_at_close_though_lists_and_the_resource_live(backend: &Backend) {
    let resource = backend.resource();
    let mark = backend.mark();
    let buffer = resource.allocate(G).unwrap().grow_into(3 * G).unwrap();
    let chunks = buffer.chunks();
    let alias = buffer.grow(3 * G).unwrap();
    buffer.close().unwrap();
    assert_eq!(backend.remains(&backend.used()).len(), 3, "the alias has it still");
    alias.close().unwrap();
    assert_eq!(chunks.iter().map(|chunk| chunk.size).collect::<Vec<_>>(), [G, 2 * G]);
    backend.require_unchanged(&mark);
    backend.require_all_gone();
    if let Some(simulator) = &backend.simulator {
        assert_eq!(simulator.physical_bytes(0), 0);
    }
    drop(resource);
}

fn what_is_written_through_one_alias_is_read_through_the_other(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), ROOM);
    let in_place = buffer.grow(ROOM + G).unwrap();
    // The room behind is taken by now.
    let moved = buffer.grow(ROOM + G).unwrap();
    assert_eq!((in_place.outcome(), moved.outcome()), (Some(Outcome::InPlace), Some(Outcome::Moved)));
    let aliases = [&buffer, &in_place, &moved];
    for (index, writer) in aliases.into_iter().enumerate() {
        let bytes = pattern(index as u8, 5000);
        let offset = ROOM - 5000 - index;
        writer.copy_from_host(offset, &bytes).unwrap();
        for reader in aliases {
            let mut seen = vec![0; bytes.len()];
            reader.copy_to_host(offset, &mut seen).unwrap();
            assert!(seen == bytes, "written through {index}");
        }
    }
    for buffer in [buffer, in_place, moved] {
        buffer.close().unwrap();
    }
    backend.require_all_gone();
}
