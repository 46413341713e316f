//! Reserving and freeing addresses: rules R11 to R22.

use cuvmm_driver::sys::{CUdevice, CUdeviceptr};
use cuvmm_sim::{Hints, Machine};

use crate::common::{Gpu, MIB, UNIT};

#[test]
fn only_positive_multiples_of_the_unit_are_reserved() {
    for gpu in Gpu::both() {
        for size in [0, 4096, 64 << 10, UNIT + 4096, usize::MAX, usize::MAX - 4095] {
            assert_eq!(gpu.reserve(size, 0, 0), Err(1), "{size:#x}");
        }
        assert!(gpu.simulator.live().is_empty());
    }
}

#[test]
fn alignments_are_powers_of_two_and_honoured() {
    for gpu in Gpu::both() {
        for alignment in [3, 3 * MIB, 6 * MIB] {
            assert_eq!(gpu.reserve(UNIT, alignment, 0), Err(1), "{alignment:#x}");
        }
        for alignment in [0, 1, 4096, UNIT, 64 * MIB, 1 << 30, 1 << 40] {
            let address = gpu.reserve(UNIT, alignment, 0).unwrap();
            assert_eq!(address % alignment.max(UNIT) as u64, 0, "{alignment:#x}");
            assert_eq!(gpu.free(address, UNIT), 0);
        }
    }
}

#[test]
fn flags_are_refused() {
    for gpu in Gpu::both() {
        let mut address = CUdeviceptr(7);
        // SAFETY: the output is a local.
        let code = unsafe { gpu.raw().cuMemAddressReserve(&raw mut address, UNIT, 0, CUdeviceptr(0), 1) };
        assert_eq!((code.0, address.0), (1, 7));
    }
}

#[test]
fn a_hint_is_granted_exactly_where_it_is_free() {
    for gpu in Gpu::both() {
        let mut end = gpu.reserve(UNIT, 0, 0).unwrap();
        for _ in 0..4 {
            end += UNIT as u64;
            assert_eq!(gpu.reserve(UNIT, 0, end), Ok(end));
        }
        assert_eq!(gpu.free(end, UNIT), 0);
        assert_eq!(gpu.reserve(UNIT, 0, end), Ok(end), "a freed address may be had again at once");
    }
}

#[test]
fn an_occupied_hint_gives_another_address() {
    for gpu in Gpu::both() {
        let taken = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        let other = gpu.reserve(UNIT, 0, taken + UNIT as u64).unwrap();
        assert!(other < taken || other >= taken + 4 * UNIT as u64);
        let host = vec![0_u8; 8 * UNIT];
        let inside = (host.as_ptr() as u64).next_multiple_of(UNIT as u64);
        assert_ne!(gpu.reserve(UNIT, 0, inside), Ok(inside));
    }
}

#[test]
fn what_the_main_threads_stack_grows_into_is_left_to_it() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
    let end = u64::from_str_radix(stack.split('-').next().unwrap(), 16).unwrap();
    for gpu in Gpu::both() {
        for size in [UNIT, 64 * MIB] {
            let below = (end - size as u64) & !(UNIT as u64 - 1);
            assert_ne!(gpu.reserve(size, 0, below).unwrap(), below);
        }
    }
}

#[test]
fn a_hint_that_no_process_has_is_refused() {
    for gpu in Gpu::both() {
        let last = (1 << 47) - 64 * MIB as u64;
        for hint in [last + UNIT as u64, 1 << 47, 1 << 48, 1 << 63, 0_u64.wrapping_sub(UNIT as u64)] {
            assert_eq!(gpu.reserve(64 * MIB, 0, hint), Err(2), "{hint:#x}");
        }
        assert!(gpu.reserve(64 * MIB, 0, last).is_ok());
    }
}

#[test]
fn a_misaligned_hint_is_refused() {
    for gpu in Gpu::both() {
        let free = gpu.reserve(UNIT, 0, 0).unwrap() + UNIT as u64;
        assert_eq!(gpu.reserve(UNIT, 0, free + (64 << 10)), Err(1));
        let odd = free.next_multiple_of(64 * MIB as u64) + UNIT as u64;
        assert_eq!(gpu.reserve(UNIT, 64 * MIB, odd), Err(1));
    }
}

#[test]
fn hints_can_be_ignored_or_refused_by_the_machine() {
    let gpu = Gpu::new(Machine::h200().hints(Hints::Elsewhere));
    let next = gpu.reserve(UNIT, 0, 0).unwrap() + UNIT as u64;
    assert_ne!(gpu.reserve(UNIT, 0, next + UNIT as u64).unwrap(), next + UNIT as u64);
    let gpu = Gpu::new(Machine::h200().hints(Hints::Refused(cuvmm_driver::CUresult::NOT_SUPPORTED)));
    let next = gpu.reserve(UNIT, 0, 0).unwrap() + UNIT as u64;
    assert_eq!(gpu.reserve(UNIT, 0, next), Err(801));
    assert!(gpu.reserve(UNIT, 0, 0).is_ok(), "without a hint there is nothing to refuse");
}

#[test]
fn a_measured_driver_ignores_small_hints_while_a_context_is_active() {
    let gpu = Gpu::measured();
    let granted = |size: usize| {
        // The end of what was free a moment ago.
        let start = gpu.reserve(4 << 30, 0, 0).unwrap();
        assert_eq!(gpu.free(start, 4 << 30), 0);
        let hint = start + (4 << 30) - size as u64;
        let given = gpu.reserve(size, 0, hint).unwrap();
        assert_eq!(gpu.free(given, size), 0);
        given == hint
    };
    let sizes = [UNIT, 16 * MIB, 24 * MIB, 28 * MIB, 32 * MIB, 1 << 30];
    assert_eq!(sizes.map(granted), [true; 6], "no context is active");
    gpu.enter(0);
    assert_eq!(sizes.map(granted), [false, false, false, true, true, true]);
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxRelease(CUdevice(0)) }.0, 0);
    assert_eq!(sizes.map(granted), [true; 6], "none is any more");
}

#[test]
fn large_reservations_cost_nothing_and_too_large_ones_answer_2() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(1 << 46, 0, 0).unwrap();
        assert_eq!(gpu.free(address, 1 << 46), 0);
        for size in [1 << 47, 1 << 60, usize::MAX - (UNIT - 1)] {
            assert_eq!(gpu.reserve(size, 0, 0), Err(2), "{size:#x}");
        }
    }
}

#[test]
fn a_window_bounds_what_is_reserved_at_once() {
    let gpu = Gpu::new(Machine::h200().address_window(4 * UNIT as u64));
    let first = gpu.reserve(3 * UNIT, 0, 0).unwrap();
    assert_eq!(gpu.reserve(2 * UNIT, 0, 0), Err(2));
    assert_eq!(gpu.free(first, 3 * UNIT), 0);
    assert!(gpu.reserve(4 * UNIT, 0, 0).is_ok());
}

#[test]
fn only_the_exact_pair_is_freed_and_once() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let end = address + 2 * UNIT as u64;
        assert_eq!(gpu.reserve(UNIT, 0, end), Ok(end));
        let wrong = [(address, UNIT), (address, 3 * UNIT), (address + UNIT as u64, UNIT), (0, UNIT), (0, 0)];
        for (address, size) in wrong {
            assert_eq!(gpu.free(address, size), 1, "{address:#x} {size:#x}");
        }
        assert_eq!(gpu.simulator.live().reservations, 2);
        assert_eq!(gpu.free(address, 2 * UNIT), 0);
        assert_eq!(gpu.free(address, 2 * UNIT), 1);
    }
}

#[test]
fn nothing_is_freed_while_something_is_mapped_in_it() {
    for gpu in Gpu::both() {
        let address = gpu.reserve(2 * UNIT, 0, 0).unwrap();
        let handle = gpu.create(UNIT).unwrap();
        assert_eq!(gpu.map(address + UNIT as u64, UNIT, handle), 0);
        assert_eq!(gpu.free(address, 2 * UNIT), 1);
        assert_eq!(gpu.release(handle), 0);
        assert_eq!(gpu.free(address, 2 * UNIT), 1, "released, but still mapped");
        assert_eq!(gpu.unmap(address + UNIT as u64, UNIT), 0);
        assert_eq!(gpu.free(address, 2 * UNIT), 0);
        assert!(gpu.simulator.live().is_empty());
    }
}

#[test]
fn reservations_of_several_simulators_never_overlap() {
    let gpus: Vec<Gpu> = (0..8).map(|_| Gpu::new(Machine::small())).collect();
    let mut starts: Vec<u64> = gpus.iter().flat_map(|gpu| (0..64).map(|_| gpu.reserve(UNIT, 0, 0).unwrap())).collect();
    starts.sort_unstable();
    assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= UNIT as u64));
}

#[test]
fn a_dropped_simulator_gives_its_addresses_back() {
    let gpu = Gpu::strict();
    let address = gpu.reserve(UNIT, 0, 0).unwrap();
    drop(gpu);
    let gpu = Gpu::strict();
    assert_eq!(gpu.reserve(UNIT, 0, address), Ok(address));
}

#[test]
fn simulators_that_live_never_take_the_room_behind_each_others_reservations() {
    let first = Gpu::strict();
    let mine = first.reserve(UNIT, 0, 0).unwrap();
    let large = first.reserve(8 << 30, 0, 0).unwrap();
    for _ in 0..1000 {
        let other = Gpu::strict();
        for (size, room) in [(UNIT, mine), (8 << 30, large)] {
            let theirs = other.reserve(size, 0, 0).unwrap();
            assert!(theirs.abs_diff(room) >= 16 << 30, "{theirs:#x} is near {room:#x}");
        }
    }
    let (behind, behind_large) = (mine + UNIT as u64, large + (8 << 30));
    assert_eq!(first.reserve(UNIT, 0, behind), Ok(behind));
    assert_eq!(first.reserve(8 << 30, 0, behind_large), Ok(behind_large));
}

#[test]
fn the_end_of_what_was_freed_is_had_again_however_much_lies_around() {
    for gpu in Gpu::both() {
        for _ in 0..16 {
            // Too fragmented, from the second round through the arena on, for one more of these to fit into it.
            let start = gpu.reserve(4 << 30, 0, 0).unwrap();
            assert_eq!(gpu.free(start, 4 << 30), 0);
            let end = start + (4 << 30) - UNIT as u64;
            // What the kernel chose itself would be given to the next thread's stack, if that fits nowhere else.
            let stack = std::thread::Builder::new().stack_size(2 << 30).spawn(std::thread::park).unwrap();
            assert_eq!(gpu.reserve(UNIT, 0, end), Ok(end));
            stack.thread().unpark();
            stack.join().unwrap();
        }
    }
}

#[test]
fn addresses_are_found_again_after_an_arena_was_used_up() {
    let gpu = Gpu::strict();
    let kept = gpu.reserve(UNIT, 0, 0).unwrap();
    for _ in 0..100 {
        let address = gpu.reserve(4 << 30, 0, 0).unwrap();
        assert!(address.abs_diff(kept) < 32 << 30, "{address:#x} is not near {kept:#x}");
        assert_eq!(gpu.free(address, 4 << 30), 0);
    }
}
