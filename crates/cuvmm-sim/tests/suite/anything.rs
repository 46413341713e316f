//! Any sequence of calls with any numbers: each gets an answer, and nothing of the process is harmed.

use cuvmm_driver::RawDriver;
use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Preset, Simulator};

use crate::common::Gpu;

const CHUNK: u64 = 64 << 10;
const CALLS: usize = 20_000;

/// Numbers that look random, and are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of what was seen before, something near it, or nonsense.
    fn like(&mut self, seen: &[u64]) -> u64 {
        let known = if seen.is_empty() { 0 } else { seen[self.below(seen.len() as u64) as usize] };
        match self.below(16) {
            0 => self.next(),
            1 => 0,
            2 => known.wrapping_add(CHUNK * self.below(4)),
            3 => known.wrapping_add(self.below(4096)),
            _ => known,
        }
    }

    fn size(&mut self) -> usize {
        match self.below(12) {
            0 => self.next() as usize,
            1 => 0,
            2 => self.below(100_000) as usize,
            _ => (CHUNK * (1 + self.below(4))) as usize,
        }
    }
}

#[derive(Default)]
struct Seen {
    addresses: Vec<u64>,
    handles: Vec<u64>,
    streams: Vec<u64>,
}

/// Makes one call; host pointers are valid or null, and all else is any number.
fn call(raw: &dyn RawDriver, numbers: &mut Numbers, seen: &mut Seen) {
    let (size, other) = (numbers.size(), numbers.size());
    let address = CUdeviceptr(numbers.like(&seen.addresses));
    let handle = CUmemGenericAllocationHandle(numbers.like(&seen.handles));
    let stream = CUstream(std::ptr::without_provenance_mut(numbers.like(&seen.streams) as usize));
    let location =
        CUmemLocation { location_type: CUmemLocationType(numbers.below(4) as u32), id: numbers.below(3) as i32 - 1 };
    let host = [7_u8; 4096];
    let mut buffer = [0_u8; 4096];
    let short = size.min(4096);
    let is_device = |address: CUdeviceptr| seen.addresses.iter().any(|&known| address.0.wrapping_sub(known) < 1 << 20);
    // SAFETY: pointers are locals' or null, host lengths within them. Addresses that are used as sources or
    // destinations are the simulator's or null, as any other would be taken for the host's.
    unsafe {
        match numbers.below(16) {
            0 | 1 => {
                let mut out = CUdeviceptr(0);
                let alignment = if numbers.below(4) == 0 { numbers.next() as usize } else { 0 };
                let hint = if numbers.below(2) == 0 { CUdeviceptr(0) } else { address };
                if raw.cuMemAddressReserve(&raw mut out, size, alignment, hint, 0).is_success() {
                    seen.addresses.push(out.0);
                }
            }
            2 => _ = raw.cuMemAddressFree(address, size),
            3 | 4 => {
                let mut out = CUmemGenericAllocationHandle(0);
                let kinds = CUmemAllocationHandleType(numbers.below(4) as u32 & 1);
                let properties = CUmemAllocationProp::pinned(location, kinds);
                if raw.cuMemCreate(&raw mut out, size, &raw const properties, 0).is_success() {
                    seen.handles.push(out.0);
                }
            }
            5 => _ = raw.cuMemRelease(handle),
            6 | 7 => _ = raw.cuMemMap(address, size, if numbers.below(9) == 0 { other } else { 0 }, handle, 0),
            8 => _ = raw.cuMemUnmap(address, size),
            9 | 10 => {
                let grants = [CUmemAccessDesc { location, flags: CUmemAccess_flags(numbers.below(5) as u32) }; 2];
                _ = raw.cuMemSetAccess(address, size, grants.as_ptr(), numbers.below(3) as usize);
            }
            11 if is_device(address) || address.0 == 0 => {
                _ = raw.cuMemcpyHtoDAsync(address, host.as_ptr().cast(), short, stream);
            }
            12 if is_device(address) || address.0 == 0 => {
                _ = raw.cuMemcpyDtoH(buffer.as_mut_ptr().cast(), address, short);
            }
            13 => _ = raw.cuMemsetD8Async(address, 1, size, stream),
            14 => {
                let mut out = CUstream::NULL;
                if raw.cuStreamCreate(&raw mut out, CUstream_flags(numbers.below(3) as u32)).is_success() {
                    seen.streams.push(out.0.addr() as u64);
                }
                _ = raw.cuStreamDestroy(stream);
            }
            15 => {
                let mut out = CUmemGenericAllocationHandle(0);
                let at = std::ptr::without_provenance_mut(address.0 as usize);
                if raw.cuMemRetainAllocationHandle(&raw mut out, at).is_success() {
                    _ = raw.cuMemRelease(out);
                }
            }
            _ => {}
        }
    }
}

#[test]
fn any_calls_get_an_answer_and_leave_nothing_behind() {
    for (preset, seed) in [(Preset::Strict, 0x9E37_79B9_7F4A_7C15), (Preset::Measured, 0xD1B5_4A32_D192_ED03)] {
        let simulator = Simulator::new(Machine::small().preset(preset).device_memory(1 << 26));
        let gpu = Gpu { driver: simulator.driver().unwrap(), simulator };
        gpu.enter(0);
        let canary = vec![0x5A_u8; 1 << 20];
        let (mut numbers, mut seen) = (Numbers(seed), Seen::default());
        for index in 0..CALLS {
            call(gpu.raw(), &mut numbers, &mut seen);
            if index % 512 == 0 {
                // A broken context would refuse all later work.
                // SAFETY: numbers alone.
                let _ = unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) };
                gpu.enter(0);
            }
        }
        assert!(canary.iter().all(|&byte| byte == 0x5A));
        let live = gpu.simulator.live();
        assert!(live.reservations > 0 && live.mappings > 0 && live.allocations > 0, "{live:?}");
        drop(gpu);
    }
}
