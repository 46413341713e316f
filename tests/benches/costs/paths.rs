//! Allocate and close, grow in place, grow by moving: each beside the driver's calls for it, with as many addresses, and the
//! first two where memory is recycled.

use std::time::Duration;

use cuvmm::handles::Reservation;
use cuvmm::{Options, Outcome, Recycling};
use cuvmm_tests::{G, MIB, ROOM, RawBuffer, Times, compare, in_turn, occupy_behind, synchronize};

use crate::{Bench, settle, timed};

/// What is allocated, or grown by, or moved.
const SIZES: [usize; 6] = [2, 64, 256, 1024, 4096, 16384];

/// At how many addresses a buffer grows in place: what the driver takes depends on where it is (measured), by more than what is
/// to be told apart.
const PLACES: usize = 5;

/// The larger, the fewer.
fn rounds(mib: usize) -> usize {
    match mib {
        ..=256 => 1000,
        257..=1024 => 500,
        1025..=4096 => 200,
        _ => 100,
    }
}

pub(crate) fn run(bench: &mut Bench) {
    for mib in SIZES {
        allocate_and_close(bench, mib);
        grow_in_place(bench, mib);
        grow_by_moving(bench, mib);
    }
}

/// The options of a resource that keeps what a case closes: nothing is released, and nothing has to settle.
fn keeping(bytes: usize) -> Options {
    Options::new().recycling(Recycling::up_to(bytes))
}

fn add_three(bench: &mut Bench, case: &str, times: &[Times; 3]) {
    for (subject, times) in ["cuvmm", "cuvmm-recycling", "raw"].into_iter().zip(times) {
        bench.rows.add(case, subject, times);
    }
}

fn add(bench: &mut Bench, case: &str, mib: usize, ours: impl FnMut() -> Duration, raw: impl FnMut() -> Duration) {
    let (ours, raw) = compare(rounds(mib), ours, raw);
    bench.rows.add(case, "cuvmm", &ours);
    bench.rows.add(case, "raw", &raw);
}

fn allocate_and_close(bench: &mut Bench, mib: usize) {
    let (case, bytes) = (format!("allocate-close/{mib}"), mib * MIB);
    if !bench.wants(&case) {
        return;
    }
    let (device, stream, resource) = (bench.device.clone(), bench.stream.clone(), bench.resource(Options::new()));
    let mut ours = || {
        let (took, ()) = timed(|| resource.allocate(bytes).unwrap().close().unwrap());
        settle(bytes);
        took
    };
    let keeping = bench.resource(keeping(bytes));
    let first = keeping.allocate(bytes).unwrap();
    let reserved = first.capacity();
    first.close().unwrap();
    let mut recycling = || timed(|| keeping.allocate(bytes).unwrap().close().unwrap()).0;
    let mut raw = || {
        let (took, ()) = timed(|| {
            let mut raw = RawBuffer::reserve(&device, reserved);
            raw.add(bytes);
            synchronize(&stream);
            raw.finish();
        });
        settle(bytes);
        took
    };
    let times = in_turn(rounds(mib), [&mut ours, &mut recycling, &mut raw]);
    add_three(bench, &case, &times);
    keeping.trim(0).unwrap();
    settle(bytes);
}

fn grow_in_place(bench: &mut Bench, mib: usize) {
    let case = format!("grow-in-place/{mib}");
    if !bench.wants(&case) {
        return;
    }
    let mut all: [Times; 3] = Default::default();
    let mut taken = Vec::new();
    for _ in 0..PLACES {
        for (all, times) in all.iter_mut().zip(grow_at_one_place(bench, mib)) {
            all.add(times);
        }
        // So that the next ones are elsewhere.
        taken.push(RawBuffer::reserve(&bench.device, ROOM));
    }
    add_three(bench, &case, &all);
    taken.into_iter().for_each(RawBuffer::finish);
}

fn grow_at_one_place(bench: &Bench, mib: usize) -> [Times; 3] {
    let bytes = mib * MIB;
    let buffer = bench.resource(Options::new()).allocate_with_capacity(G, G + bytes).unwrap();
    let mut raw = RawBuffer::reserve(&bench.device, buffer.capacity());
    raw.add(G);
    let mut ours = || {
        let (took, grown) = timed(|| buffer.grow(G + bytes).unwrap());
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        grown.close().unwrap();
        settle(bytes);
        took
    };
    let keeping = bench.resource(keeping(bytes));
    let kept = keeping.allocate_with_capacity(G, G + bytes).unwrap();
    let mut recycling = || {
        let (took, grown) = timed(|| kept.grow(G + bytes).unwrap());
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        grown.close().unwrap();
        took
    };
    let mut theirs = || {
        let (took, ()) = timed(|| raw.add(bytes));
        raw.cut();
        settle(bytes);
        took
    };
    let times = in_turn(rounds(mib) / PLACES, [&mut ours, &mut recycling, &mut theirs]);
    raw.finish();
    keeping.trim(0).unwrap();
    settle(bytes);
    times
}

fn grow_by_moving(bench: &mut Bench, mib: usize) {
    let (case, bytes) = (format!("grow-move/{mib}"), mib * MIB);
    if !bench.wants(&case) {
        return;
    }
    let buffer = bench.resource(Options::new()).allocate(bytes).unwrap();
    // A small one has some room by itself.
    let (reserved, more) = (buffer.capacity(), buffer.capacity() - bytes + G);
    let _behind = occupy_behind(&buffer);
    let moved = buffer.grow(bytes + more).unwrap();
    let reserved_after = moved.capacity();
    moved.close().unwrap();
    let mut raw = RawBuffer::reserve(&bench.device, reserved);
    raw.add(bytes);
    let room = Reservation::GRANULARITY.exact(ROOM).unwrap();
    // Where that is somebody else's already, it is as good.
    let _behind_raw = Reservation::hinted(bench.device.driver(), room, 0, raw.end()).unwrap();
    let ours = || {
        let (took, moved) = timed(|| buffer.grow(bytes + more).unwrap());
        assert_eq!(moved.outcome(), Some(Outcome::Moved));
        moved.close().unwrap();
        settle(more);
        took
    };
    let theirs = || {
        let (took, moved) = timed(|| {
            let mut moved = raw.remap(reserved_after);
            moved.add(more);
            moved
        });
        moved.finish_beside(1);
        settle(more);
        took
    };
    add(bench, &case, mib, ours, theirs);
    raw.finish();
}
