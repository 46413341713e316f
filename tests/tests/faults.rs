//! Every driver call of allocating and growing made to fail, before its effect and after it: the error names the
//! call, and nothing is lost but what the call itself made.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::{CUresult, Call, Error, Outcome, VirtualMemoryBuffer};
use cuvmm_sim::faults::When;
use cuvmm_tests::{
    Backend, CODES, G, Left, MIB, ROOM, Step, occupy_behind, require_marks, steps, with_room_behind, write_marks,
};

cuvmm_tests::suite!(
    a_failed_call_of_allocate_leaves_nothing,
    a_failed_call_of_allocate_with_capacity_leaves_nothing,
    fewer_addresses_are_taken_only_where_so_many_are_not_there,
    a_failed_call_of_a_grow_within_the_capacity_leaves_the_input_as_it_was,
    a_failed_call_of_a_grow_behind_the_reservation_leaves_the_input_as_it_was,
    a_failed_call_of_a_grow_across_the_capacity_leaves_the_input_as_it_was,
    a_failed_call_of_a_grow_that_moves_leaves_the_input_as_it_was,
    a_failed_call_of_a_grow_whose_room_is_taken_leaves_the_input_as_it_was,
    a_failed_call_of_grow_into_gives_the_buffer_back,
    a_reservation_behind_that_fails_means_to_move,
    a_reservation_elsewhere_that_is_not_given_back_is_stranded_and_the_buffer_moves,
    what_a_call_of_allocate_made_before_it_failed_is_all_that_is_lost,
    what_a_call_of_a_grow_in_place_made_before_it_failed_is_all_that_is_lost,
    what_a_call_of_a_grow_that_moves_made_before_it_failed_is_all_that_is_lost,
    the_first_error_is_told_when_cleaning_up_fails_too,
    a_call_that_failed_once_succeeds_the_next_time,
);

/// Makes each of the calls fail with each code before its effect, and demands that the operation fails with exactly
/// that and leaves what there was; then `check` looks at the input.
#[track_caller]
fn fail_each<E: Into<Error>>(
    backend: &Backend,
    steps: &[Step],
    mut operation: impl FnMut() -> Result<VirtualMemoryBuffer, E>,
    mut check: impl FnMut(),
) {
    assert!(steps.len() >= 3, "{steps:?}");
    for step in steps {
        for code in CODES {
            let mark = backend.mark();
            let fired = backend.faults.fired();
            backend.faults.fail(step.call, step.nth, code, When::Before);
            let result = operation().map_err(Into::into);
            backend.faults.clear();
            assert_eq!(backend.faults.fired(), fired + 1, "{step:?} was not called");
            let error = result.err().unwrap_or_else(|| panic!("{step:?} failed with {code}, and nothing noticed"));
            assert_eq!((error.call(), error.code()), (Some(step.call), Some(code)), "{error}");
            assert!(error.to_string().contains(&step.call.to_string()), "{error}");
            backend.require_unchanged(&mark);
            check();
        }
    }
}

/// Demands that a buffer holds marks 7 and grows: that it is usable.
#[track_caller]
fn require_intact(buffer: &VirtualMemoryBuffer, size: usize) {
    assert_eq!(buffer.size(), size);
    require_marks(buffer, 7, size);
    let larger = buffer.grow(size + G).unwrap();
    require_marks(&larger, 7, size);
    larger.close().unwrap();
}

/// A buffer of `chunks` chunks of one granule that holds marks 7, with capacity for `capacity` bytes.
fn chunked(backend: &Backend, chunks: usize, capacity: usize) -> VirtualMemoryBuffer {
    let mut buffer = backend.resource().allocate_with_capacity(G, capacity).unwrap();
    for chunk in 1..chunks {
        buffer = buffer.grow_into((chunk + 1) * G).unwrap();
    }
    assert_eq!(buffer.chunks().len(), chunks);
    write_marks(&buffer, 7);
    buffer
}

/// The calls of growing `buffer` to `size`, which has that outcome.
fn steps_of_grow(backend: &Backend, buffer: &VirtualMemoryBuffer, size: usize, outcome: Outcome) -> Vec<Step> {
    let (steps, grown) = steps(backend, || buffer.grow(size).unwrap());
    assert_eq!(grown.outcome(), Some(outcome));
    grown.close().unwrap();
    steps
}

fn of(steps: &[Step], call: Call) -> Vec<Step> {
    steps.iter().copied().filter(|step| step.call == call).collect()
}

fn a_failed_call_of_allocate_leaves_nothing(backend: &Backend) {
    let resource = backend.resource();
    let (steps, buffer) = steps(backend, || resource.allocate(3 * MIB).unwrap());
    let calls: Vec<Call> = steps.iter().map(|step| step.call).collect();
    assert_eq!(calls, [Call::cuMemAddressReserve, Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess]);
    buffer.close().unwrap();
    fail_each(backend, &steps, || resource.allocate(3 * MIB), || {});
}

fn a_failed_call_of_allocate_with_capacity_leaves_nothing(backend: &Backend) {
    let resource = backend.resource();
    let (mut steps, buffer) = steps(backend, || resource.allocate_with_capacity(G, 64 * MIB).unwrap());
    buffer.close().unwrap();
    // Where so many addresses are not there, it is fewer: another test's matter.
    steps.retain(|step| step.call != Call::cuMemAddressReserve);
    fail_each(backend, &steps, || resource.allocate_with_capacity(G, 64 * MIB), || {});
}

fn fewer_addresses_are_taken_only_where_so_many_are_not_there(backend: &Backend) {
    let resource = backend.resource();
    for code in CODES {
        let mark = backend.mark();
        backend.faults.fail(Call::cuMemAddressReserve, 1, code, When::Before);
        let result = resource.allocate_with_capacity(G, 1 << 30);
        backend.faults.clear();
        if code == CUresult::OUT_OF_MEMORY {
            let buffer = result.unwrap();
            assert!(buffer.capacity() < 1 << 30 && buffer.capacity() > G, "{}", buffer.capacity());
            buffer.close().unwrap();
        } else {
            let error = result.unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressReserve), Some(code)));
        }
        backend.require_unchanged(&mark);
    }
    // Not even what is needed: the error of the last try, and no endless ones.
    let mark = backend.mark();
    backend.faults.fail_when(Call::cuMemAddressReserve, |_| true, CUresult::OUT_OF_MEMORY, When::Before);
    let error = resource.allocate_with_capacity(G, 1 << 30).unwrap_err();
    backend.faults.clear();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressReserve), Some(CUresult::OUT_OF_MEMORY)));
    backend.require_unchanged(&mark);
}

fn a_failed_call_of_a_grow_within_the_capacity_leaves_the_input_as_it_was(backend: &Backend) {
    for chunks in [1, 3] {
        let buffer = chunked(backend, chunks, 16 * G);
        let (size, larger) = (buffer.size(), buffer.size() + 2 * G);
        let steps = steps_of_grow(backend, &buffer, larger, Outcome::InPlace);
        assert_eq!(steps.len(), 3);
        fail_each(backend, &steps, || buffer.grow(larger), || require_intact(&buffer, size));
        buffer.close().unwrap();
    }
}

fn a_failed_call_of_a_grow_behind_the_reservation_leaves_the_input_as_it_was(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), ROOM);
    assert_eq!(buffer.capacity(), ROOM);
    write_marks(&buffer, 7);
    let mut steps = steps_of_grow(backend, &buffer, ROOM + 2 * G, Outcome::InPlace);
    assert_eq!(steps.len(), 4);
    steps.retain(|step| step.call != Call::cuMemAddressReserve);
    fail_each(backend, &steps, || buffer.grow(ROOM + 2 * G), || require_intact(&buffer, ROOM));
    buffer.close().unwrap();
}

fn a_failed_call_of_a_grow_across_the_capacity_leaves_the_input_as_it_was(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), G);
    write_marks(&buffer, 7);
    let larger = buffer.capacity() + G;
    let mut steps = steps_of_grow(backend, &buffer, larger, Outcome::InPlace);
    assert_eq!(of(&steps, Call::cuMemMap).len(), 2);
    steps.retain(|step| step.call != Call::cuMemAddressReserve);
    fail_each(backend, &steps, || buffer.grow(larger), || require_intact(&buffer, G));
    buffer.close().unwrap();
}

fn a_failed_call_of_a_grow_that_moves_leaves_the_input_as_it_was(backend: &Backend) {
    for chunks in [1, 3] {
        let buffer = chunked(backend, chunks, ROOM);
        let (size, larger) = (buffer.size(), buffer.capacity() + G);
        let _occupied = occupy_behind(&buffer);
        let mut steps = steps_of_grow(backend, &buffer, larger, Outcome::Moved);
        assert_eq!(of(&steps, Call::cuMemMap).len(), chunks + 1);
        assert_eq!(of(&steps, Call::cuMemCreate).len(), 1);
        // The first reservation is the one behind, and what is freed is where the driver made it instead.
        steps.retain(|step| {
            step.call != Call::cuMemAddressFree && (step.call != Call::cuMemAddressReserve || step.nth > 1)
        });
        fail_each(backend, &steps, || buffer.grow(larger), || require_intact(&buffer, size));
        buffer.close().unwrap();
    }
}

fn a_failed_call_of_a_grow_whose_room_is_taken_leaves_the_input_as_it_was(backend: &Backend) {
    let buffer = chunked(backend, 3, 8 * G);
    let other = buffer.grow(4 * G).unwrap();
    let steps = steps_of_grow(backend, &buffer, 5 * G, Outcome::Moved);
    assert_eq!(steps.len(), 1 + 2 * 3 + 3, "{steps:?}");
    fail_each(backend, &steps, || buffer.grow(5 * G), || require_intact(&buffer, 3 * G));
    require_marks(&other, 7, 3 * G);
    other.close().unwrap();
    buffer.close().unwrap();
}

fn a_failed_call_of_grow_into_gives_the_buffer_back(backend: &Backend) {
    let mut buffer = chunked(backend, 2, ROOM);
    let _occupied = occupy_behind(&buffer);
    let larger = buffer.capacity() + G;
    for (call, nth) in
        [(Call::cuMemAddressReserve, 2), (Call::cuMemMap, 1), (Call::cuMemMap, 3), (Call::cuMemCreate, 1)]
    {
        let mark = backend.mark();
        backend.faults.fail(call, nth, CUresult::UNKNOWN, When::Before);
        let error = buffer.grow_into(larger).unwrap_err();
        backend.faults.clear();
        assert_eq!((error.error().call(), error.error().code()), (Some(call), Some(CUresult::UNKNOWN)));
        buffer = error.into_buffer();
        backend.require_unchanged(&mark);
        require_intact(&buffer, 2 * G);
    }
    let grown = buffer.grow_into(larger).unwrap();
    assert_eq!(grown.outcome(), Some(Outcome::Moved));
    require_marks(&grown, 7, 2 * G);
    grown.close().unwrap();
}

fn a_reservation_behind_that_fails_means_to_move(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), ROOM);
    write_marks(&buffer, 7);
    for code in CODES {
        let mark = backend.mark();
        backend.faults.fail(Call::cuMemAddressReserve, 1, code, When::Before);
        let grown = buffer.grow(ROOM + G).unwrap();
        backend.faults.clear();
        assert_eq!(grown.outcome(), Some(Outcome::Moved));
        assert_ne!(grown.address(), buffer.address());
        require_marks(&grown, 7, ROOM);
        grown.close().unwrap();
        backend.require_unchanged(&mark);
    }
    // The next one gets the addresses again.
    let grown = buffer.grow(ROOM + G).unwrap();
    assert_eq!((grown.outcome(), grown.address()), (Some(Outcome::InPlace), buffer.address()));
    grown.close().unwrap();
    buffer.close().unwrap();
}

fn a_reservation_elsewhere_that_is_not_given_back_is_stranded_and_the_buffer_moves(backend: &Backend) {
    let buffer = chunked(backend, 1, ROOM);
    let larger = buffer.capacity() + G;
    let _occupied = occupy_behind(&buffer);
    let steps = steps_of_grow(backend, &buffer, larger, Outcome::Moved);
    assert_eq!(of(&steps, Call::cuMemAddressFree).len(), 1);
    let mark = backend.mark();
    backend.faults.fail(Call::cuMemAddressFree, 1, CUresult::UNKNOWN, When::Before);
    let grown = buffer.grow(larger).unwrap();
    backend.faults.clear();
    assert_eq!(grown.outcome(), Some(Outcome::Moved));
    require_marks(&grown, 7, G);
    grown.close().unwrap();
    backend.require_left(&mark, Left { reservations: 1, stranded: 1, ..Left::default() });
    buffer.close().unwrap();
}

/// What is lost when a call of an allocation or a grow has had its effect and is said to have failed, with the bytes of
/// memory that nothing else keeps.
fn lost(call: Call, bytes: usize) -> Left {
    match call {
        Call::cuMemAddressReserve => Left { reservations: 1, ..Left::default() },
        Call::cuMemCreate => Left { allocations: 1, bytes: Some(bytes), ..Left::default() },
        // A mapping that nobody knows of keeps its reservation from being freed.
        Call::cuMemMap => Left { mappings: 1, reservations: 1, stranded: 1, bytes: Some(bytes), ..Left::default() },
        // Unmapping takes the access away.
        Call::cuMemSetAccess => Left::default(),
        call => panic!("{call} is not to be made"),
    }
}

/// Makes each of the calls fail after its effect. `bytes` says how much memory is then kept by nothing else.
fn fail_each_after(
    backend: &Backend,
    steps: &[Step],
    bytes: impl Fn(Step) -> usize,
    mut operation: impl FnMut() -> Result<VirtualMemoryBuffer, cuvmm_resource::Error>,
    mut check: impl FnMut(),
) {
    for step in steps {
        let mark = backend.mark();
        backend.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::After);
        let error = operation().unwrap_err();
        backend.faults.clear();
        assert_eq!((error.call(), error.code()), (Some(step.call), Some(CUresult::UNKNOWN)));
        backend.require_left(&mark, lost(step.call, bytes(*step)));
        check();
    }
}

fn what_a_call_of_allocate_made_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    let resource = backend.resource();
    let (steps, buffer) = steps(backend, || resource.allocate(G).unwrap());
    buffer.close().unwrap();
    fail_each_after(backend, &steps, |_| G, || resource.allocate(G), || {});
}

fn what_a_call_of_a_grow_in_place_made_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    // Each call leaves its mark behind a buffer of its own.
    for index in 0..3 {
        let buffer = chunked(backend, 2, 8 * G);
        let steps = steps_of_grow(backend, &buffer, 3 * G, Outcome::InPlace);
        let step = steps[index];
        let mark = backend.mark();
        backend.faults.fail(step.call, step.nth, CUresult::UNKNOWN, When::After);
        let error = buffer.grow(3 * G).unwrap_err();
        backend.faults.clear();
        assert_eq!((error.call(), error.code()), (Some(step.call), Some(CUresult::UNKNOWN)));
        require_marks(&buffer, 7, 2 * G);
        if step.call == Call::cuMemMap {
            // The mapping that nobody knows of is in the buffer's own reservation, which therefore stays when the
            // buffer closes; its chunks go.
            backend.require_left(&mark, Left { mappings: 1, bytes: Some(G), ..Left::default() });
            let closed = buffer.close().unwrap_err();
            assert_eq!(closed.error().call(), Some(Call::cuMemAddressFree));
            backend.require_stays(Left { reservations: 1, stranded: 1, ..Left::default() });
        } else {
            backend.require_left(&mark, lost(step.call, G));
            require_intact(&buffer, 2 * G);
            buffer.close().unwrap();
        }
    }
}

fn what_a_call_of_a_grow_that_moves_made_before_it_failed_is_all_that_is_lost(backend: &Backend) {
    let buffer = chunked(backend, 3, 8 * G);
    // The room is taken, so that nothing is tried behind.
    let other = buffer.grow(4 * G).unwrap();
    let steps = steps_of_grow(backend, &buffer, 5 * G, Outcome::Moved);
    // The first three maps are of memory that the buffer has, the fourth of the chunk that is made for it.
    let is_new = |step: Step| step.call == Call::cuMemCreate || step.nth > 3;
    let bytes = |step| if is_new(step) { 2 * G } else { 0 };
    fail_each_after(backend, &steps, bytes, || buffer.grow(5 * G), || require_intact(&buffer, 3 * G));
    other.close().unwrap();
    buffer.close().unwrap();
    // The three chunks stay with the mappings that were lost.
    backend.require_stays(Left { bytes: Some(3 * G), ..Left::default() });
}

fn the_first_error_is_told_when_cleaning_up_fails_too(backend: &Backend) {
    let buffer = chunked(backend, 3, 8 * G);
    let other = buffer.grow(4 * G).unwrap();
    let mark = backend.mark();
    // The third map fails, and so does unmapping the second: only that one, and the addresses around it, are lost.
    backend.faults.fail(Call::cuMemMap, 3, CUresult::OUT_OF_MEMORY, When::Before);
    backend.faults.fail(Call::cuMemUnmap, 1, CUresult::UNKNOWN, When::Before);
    let error = buffer.grow(5 * G).unwrap_err();
    backend.faults.clear();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemMap), Some(CUresult::OUT_OF_MEMORY)));
    let kept = Left { mappings: 1, reservations: 1, stranded: 1, ..Left::default() };
    // The buffer has that memory too, as long as it lives.
    backend.require_left(&mark, Left { bytes: Some(0), ..kept });
    require_intact(&buffer, 3 * G);
    other.close().unwrap();
    buffer.close().unwrap();
    backend.require_stays(Left { bytes: Some(G), ..Left::default() });
}

fn a_call_that_failed_once_succeeds_the_next_time(backend: &Backend) {
    let resource = backend.resource();
    for (call, code) in [
        (Call::cuMemCreate, CUresult::OUT_OF_MEMORY),
        (Call::cuMemMap, CUresult::UNKNOWN),
        (Call::cuMemSetAccess, CUresult::NOT_READY),
    ] {
        backend.faults.fail(call, 1, code, When::Before);
        assert_eq!(resource.allocate(G).unwrap_err().code(), Some(code));
        let buffer = resource.allocate(G).unwrap();
        write_marks(&buffer, 7);
        require_intact(&buffer, G);
        backend.faults.fail(call, 1, code, When::Before);
        assert_eq!(buffer.grow(2 * G).unwrap_err().code(), Some(code));
        require_intact(&buffer, G);
        buffer.close().unwrap();
    }
}
