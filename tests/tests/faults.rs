//! Failures that an operation gets over, and several at once. Each failing call by itself is the fault matrix's matter.
#![deny(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use cuvmm::{CUresult, Call, Outcome, Release};
use cuvmm_sim::faults::When;
use cuvmm_tests::matrix::codes;
use cuvmm_tests::{Backend, G, Left, ROOM, require_marks, with_room_behind, write_marks};

cuvmm_tests::suite!(
    fewer_addresses_are_taken_only_where_so_many_are_not_there,
    a_reservation_behind_that_fails_means_to_move,
    the_first_error_is_told_when_cleaning_up_fails_too,
    several_failures_of_closing_are_counted_each_and_the_first_is_told,
);

fn fewer_addresses_are_taken_only_where_so_many_are_not_there(backend: &Backend) {
    let resource = backend.resource();
    for code in codes(Call::cuMemAddressReserve) {
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

fn a_reservation_behind_that_fails_means_to_move(backend: &Backend) {
    let buffer = with_room_behind(&backend.resource(), ROOM);
    write_marks(&buffer, 7);
    for code in codes(Call::cuMemAddressReserve) {
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

fn the_first_error_is_told_when_cleaning_up_fails_too(backend: &Backend) {
    let buffer = backend.resource().allocate_with_capacity(G, 8 * G).unwrap();
    let buffer = buffer.grow_into(2 * G).unwrap().grow_into(3 * G).unwrap();
    write_marks(&buffer, 7);
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
    require_marks(&buffer, 7, 3 * G);
    buffer.grow(6 * G).unwrap().close().unwrap();
    other.close().unwrap();
    buffer.close().unwrap();
    backend.require_stays(Left { bytes: Some(G), ..Left::default() });
}

fn several_failures_of_closing_are_counted_each_and_the_first_is_told(backend: &Backend) {
    let mark = backend.mark();
    let buffer = backend.resource().allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let longer = buffer.grow(2 * G).unwrap();
    drop(buffer);
    backend.faults.fail(Call::cuMemRelease, 1, CUresult::INVALID_VALUE, When::Before);
    backend.faults.fail(Call::cuMemUnmap, 2, CUresult::UNKNOWN, When::Before);
    let (error, none) = longer.close().unwrap_err().into_parts();
    backend.faults.clear();
    assert!(none.is_none());
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemRelease), Some(CUresult::INVALID_VALUE)));
    // The second chunk's memory, and the first one's mapping with the addresses around it.
    backend.require_left(&mark, Left { mappings: 1, reservations: 1, allocations: 1, stranded: 2, ..Left::default() });
}
