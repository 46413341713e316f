//! How much is made in one piece, and how much a grow adds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuvmm_driver::{CUresult, Call};
use cuvmm_resource::{Error, GrowthPolicy, Options, Outcome, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Hints, Machine, When};

use crate::support::{Bench, G, R};

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

fn sizes(buffer: &VirtualMemoryBuffer, unit: usize) -> Vec<usize> {
    buffer.chunks().iter().map(|chunk| chunk.size / unit).collect()
}

#[test]
fn a_request_larger_than_a_piece_can_be_is_made_in_several() {
    let bench = Bench::new(Machine::h200());
    let too_large = |arguments: &[u64]| arguments[1] > (16 * GIB) as u64;
    bench.faults.fail_when(Call::cuMemCreate, too_large, CUresult::OUT_OF_MEMORY, When::Before);
    let error = bench.plain().allocate(24 * GIB).unwrap_err();
    let Error::OutOfMemory(shortage) = &error else { panic!("{error}") };
    assert_eq!((shortage.requested, shortage.granularity, shortage.memory), (24 * GIB, 2 * MIB, None));
    bench.assert_clean();

    let resource = bench.resource(Options::new().max_chunk(8 * GIB));
    bench.simulator.clear_calls();
    let buffer = resource.allocate(24 * GIB).unwrap();
    assert_eq!(sizes(&buffer, GIB), [8, 8, 8]);
    assert_eq!((buffer.size(), bench.count(Call::cuMemSetAccess)), (24 * GIB, 3));
    assert_eq!(bench.count(Call::cuMemAddressReserve), 1);
    // Over a border of chunks.
    buffer.copy_from_host(8 * GIB - 3, b"across").unwrap();
    let mut bytes = [0; 6];
    buffer.copy_to_host(8 * GIB - 3, &mut bytes).unwrap();
    assert_eq!(&bytes, b"across");
    let larger = buffer.grow(50 * GIB).unwrap();
    assert_eq!(sizes(&larger, GIB), [8, 8, 8, 8, 8, 8, 2]);
    drop((buffer, larger));
    drop(resource);
    bench.assert_clean();
}

#[test]
fn a_bound_is_rounded_down_to_the_granularity() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let resource = bench.resource(Options::new().max_chunk(6 * G - 1));
        let buffer = resource.allocate(12 * G).unwrap();
        let larger = buffer.grow(19 * G).unwrap();
        let roomy = resource.allocate_with_capacity(6 * G, R).unwrap();
        assert_eq!(sizes(&buffer, G), [5, 5, 2]);
        assert_eq!(sizes(&larger, G), [5, 5, 2, 5, 2]);
        assert_eq!(sizes(&roomy, G), [5, 1]);
        drop((buffer, larger, roomy));
        bench.assert_clean();
    }
    let bench = Bench::small();
    for bound in [0, 1, G - 1] {
        let made = VirtualMemoryResource::new(&bench.device(), Options::new().max_chunk(bound));
        assert_eq!(made.map(drop), Err(Error::MaxChunk { bound, granularity: G }));
    }
    drop(bench.resource(Options::new().max_chunk(usize::MAX)).allocate(5 * G).unwrap());
    bench.assert_clean();
}

#[test]
fn whichever_piece_fails_nothing_is_left_and_the_next_try_works() {
    let bench = Bench::small();
    let resource = bench.resource(Options::new().max_chunk(G));
    for call in [Call::cuMemCreate, Call::cuMemMap, Call::cuMemSetAccess] {
        for nth in 1..=8 {
            bench.faults.fail(call, nth, CUresult::UNKNOWN, When::Before);
            let error = resource.allocate(8 * G).unwrap_err();
            assert_eq!((error.call(), error.code()), (Some(call), Some(CUresult::UNKNOWN)));
            bench.assert_clean();
        }
    }
    assert_eq!(resource.allocate(8 * G).unwrap().chunks().len(), 8);
}

#[test]
fn doubling_makes_few_chunks_and_covered_grows_make_no_call() {
    for capacity in [0, 8 * GIB] {
        let bench = Bench::new(Machine::h200());
        let resource = bench.resource(Options::new().growth(GrowthPolicy::doubling()));
        let mut buffer = resource.allocate_with_capacity(2 * MIB, capacity).unwrap();
        for size in (4 * MIB..=8 * GIB).step_by(2 * MIB) {
            bench.simulator.clear_calls();
            let before = bench.simulator.physical_bytes(0);
            buffer = buffer.grow_into(size).unwrap();
            assert_eq!(buffer.size(), size, "what was asked for");
            match buffer.outcome() {
                Some(Outcome::Covered) => bench.assert_no_call(),
                Some(Outcome::InPlace) => assert_eq!(bench.simulator.physical_bytes(0), 2 * before),
                outcome => panic!("{outcome:?} at {size}"),
            }
        }
        assert_eq!(buffer.chunks().iter().map(|chunk| chunk.size).sum::<usize>(), 8 * GIB);
        assert!(buffer.chunks().len() <= 13, "{}", buffer.chunks().len());
        drop((buffer, resource));
        bench.assert_clean();
    }
}

#[test]
fn a_policy_adds_what_it_says_and_at_least_what_is_needed() {
    let bench = Bench::small();
    let geometric = GrowthPolicy::Geometric { percent: 50, floor: 4 * G, cap: 8 * G };
    for (policy, asked, had) in [
        (GrowthPolicy::Exact, [2, 3, 20], [2, 3, 20]),
        (GrowthPolicy::Step(5 * G), [2, 6, 20], [6, 6, 21]),
        (GrowthPolicy::Step(5 * G - 1), [2, 6, 20], [6, 6, 21]),
        (geometric, [2, 6, 20], [5, 9, 20]),
        (geometric, [12, 13, 40], [12, 18, 40]),
        (GrowthPolicy::doubling(), [2, 3, 20], [2, 4, 20]),
    ] {
        let resource = bench.resource(Options::new().growth(policy));
        let mut buffer = resource.allocate_with_capacity(G, 64 * G).unwrap();
        for (asked, had) in asked.into_iter().zip(had) {
            buffer = buffer.grow_into(asked * G).unwrap();
            let sum: usize = sizes(&buffer, G).iter().sum();
            assert_eq!(buffer.size(), asked * G);
            assert_eq!(bench.simulator.physical_bytes(0), had * G, "{policy:?} {asked}");
            assert!(sum <= had, "what shows of it covers the size");
        }
        // All of it goes, also what was never asked for.
        drop(buffer);
        bench.assert_clean();
    }
}

#[test]
fn what_is_needed_is_added_where_there_is_no_memory_for_more() {
    let bench = Bench::small();
    let asked = Arc::new(AtomicUsize::new(0));
    let hook = {
        let asked = Arc::clone(&asked);
        move |_: &cuvmm_resource::OutOfMemory| {
            asked.fetch_add(1, Ordering::Relaxed);
            false
        }
    };
    let options = Options::new().growth(GrowthPolicy::doubling()).on_out_of_memory(hook);
    let resource = bench.resource(options.retry_out_of_memory(1, std::time::Duration::ZERO));
    for roomy in [true, false] {
        let buffer = resource.allocate_with_capacity(600 * MIB, if roomy { 4 * GIB } else { 0 }).unwrap();
        let taken = if roomy { None } else { Some(buffer.grow(600 * MIB + G).unwrap()) };
        bench.simulator.clear_calls();
        asked.store(0, Ordering::Relaxed);
        let grown = buffer.grow(700 * MIB).unwrap();
        let outcome = if roomy { Outcome::InPlace } else { Outcome::Moved };
        assert_eq!((grown.outcome(), grown.size()), (Some(outcome), 700 * MIB));
        assert_eq!(sizes(&grown, MIB).iter().sum::<usize>(), 700);
        assert_eq!(bench.count(Call::cuMemCreate), 2, "nothing is asked of anybody for a wish");
        assert_eq!(asked.load(Ordering::Relaxed), 0);
        // What is needed is worth asking for.
        let error = grown.grow(2 * GIB).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(shortage) if shortage.requested > GIB));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        drop((buffer, grown, taken));
        bench.assert_clean();
    }
}

#[test]
fn what_is_needed_is_added_where_there_is_no_memory_to_grant_more() {
    for hints in [Hints::Granted, Hints::Refused(CUresult::INVALID_VALUE)] {
        let bench = Bench::new(Machine::small().hints(hints));
        let resource = bench.resource(Options::new().growth(GrowthPolicy::Step(64 * MIB)));
        let buffer = resource.allocate(32 * MIB).unwrap();
        let fail = |code| {
            let is_much = |arguments: &[u64]| arguments[1] == (64 * MIB) as u64;
            bench.faults.fail_when(Call::cuMemSetAccess, is_much, code, When::Before);
        };
        fail(CUresult::OUT_OF_MEMORY);
        let grown = buffer.grow(33 * MIB).unwrap();
        assert_eq!((sizes(&grown, MIB), bench.faults.fired()), (vec![32, 1], 1));
        bench.faults.clear();
        drop(grown);
        // What says nothing of memory is told.
        fail(CUresult::UNKNOWN);
        assert_eq!(buffer.grow(33 * MIB).unwrap_err().code(), Some(CUresult::UNKNOWN));
        drop((buffer, resource));
        bench.assert_clean();
    }
}

#[test]
fn what_is_needed_is_added_where_there_are_no_addresses_for_more() {
    let bench = Bench::new(Machine::small().hints(Hints::Elsewhere));
    let resource = bench.resource(Options::new().growth(GrowthPolicy::doubling()));
    let buffer = resource.allocate_with_capacity(64 * MIB, 96 * MIB).unwrap();
    let grown = buffer.grow(72 * MIB).unwrap();
    // What there is room for.
    assert_eq!((grown.outcome(), sizes(&grown, MIB)), (Some(Outcome::InPlace), vec![64, 32]));
    drop((buffer, grown, resource));
    bench.assert_clean();

    // Nor elsewhere.
    let bench = Bench::new(Machine::small().hints(Hints::Elsewhere).address_window(160 * MIB as u64));
    let resource = bench.resource(Options::new().growth(GrowthPolicy::doubling()));
    let buffer = resource.allocate(64 * MIB).unwrap();
    let moved = buffer.grow(72 * MIB).unwrap();
    assert_eq!((moved.outcome(), sizes(&moved, MIB)), (Some(Outcome::Moved), vec![64, 8]));
    drop((buffer, moved));
    bench.assert_clean();
}

#[test]
fn wishes_that_no_address_space_holds_are_none() {
    let bench = Bench::small();
    for policy in [
        GrowthPolicy::Step(usize::MAX),
        GrowthPolicy::Step(1 << 62),
        GrowthPolicy::Geometric { percent: u32::MAX, floor: usize::MAX, cap: usize::MAX },
        GrowthPolicy::Geometric { percent: 1, floor: usize::MAX - 16 * MIB + 1, cap: usize::MAX },
    ] {
        let resource = bench.resource(Options::new().growth(policy));
        for size in [0, G] {
            let buffer = resource.allocate(size).unwrap();
            let grown = buffer.grow(4 * G).unwrap();
            assert_eq!(grown.size(), 4 * G);
            // What was needed, or what there was room for.
            assert!((4 * G..=32 * MIB).contains(&bench.simulator.physical_bytes(0)), "{policy:?}");
            grown.close().unwrap();
        }
    }
    bench.assert_clean();
}

#[test]
fn policies_that_mean_nothing_are_refused_before_any_call() {
    let bench = Bench::small();
    for (policy, reason) in [
        (GrowthPolicy::Step(0), "a step of 0 bytes"),
        (GrowthPolicy::Geometric { percent: 0, floor: 1, cap: 2 }, "a growth of 0 percent"),
        (GrowthPolicy::Geometric { percent: 50, floor: 2, cap: 1 }, "a floor above the cap"),
    ] {
        let made = VirtualMemoryResource::new(&bench.device(), Options::new().growth(policy));
        assert_eq!(made.map(drop), Err(Error::GrowthPolicy { reason }));
    }
    bench.assert_no_call();
}
