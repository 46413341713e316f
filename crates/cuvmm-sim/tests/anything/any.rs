//! Arguments of any call: every number there is, and host pointers that are null or valid.
//!
//! # Safety
//! Pointers are null, or of memory that has room for all that any call reads or writes there: of eight values of their
//! type while the call is made, or of buffers that live as long as the process. What a call reads by length is shorter.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};
use std::os::fd::AsRawFd;

use cuvmm_driver::Call;
use cuvmm_driver::sys::*;
use cuvmm_sim::kernels;

use crate::world::{BUFFER, World, host_function, sink, source};

/// Values in an array that a pointer leads to.
const VALUES: usize = 8;

/// A value of an argument.
pub(crate) trait Any: Sized {
    fn any(world: &mut World<'_>) -> Self;

    /// Notes what a call that succeeded wrote.
    fn keep(self, _world: &mut World<'_>) {}
}

impl<T: Any + Copy + 'static> Any for *const T {
    fn any(world: &mut World<'_>) -> Self {
        <*mut T>::any(world).cast_const()
    }
}

impl<T: Any + Copy + 'static> Any for *mut T {
    fn any(world: &mut World<'_>) -> Self {
        if world.numbers.one_in(16) {
            return std::ptr::null_mut();
        }
        let mut values: Box<[T]> = (0..VALUES).map(|_| T::any(world)).collect();
        let pointer = values.as_mut_ptr();
        let values = Box::into_raw(values);
        world.written.push(Box::new(move |world, success| {
            // SAFETY: it was made above, and the call that had the pointer has returned.
            let values = unsafe { Box::from_raw(values) };
            if success {
                values[0].keep(world);
            }
        }));
        pointer
    }
}

impl Any for *const c_void {
    fn any(world: &mut World<'_>) -> Self {
        match world.numbers.below(16) {
            0 => std::ptr::null(),
            _ if world.call == Call::cuModuleLoadData => kernels::PTX.as_ptr().cast(),
            _ => source(),
        }
    }
}

impl Any for *mut c_void {
    fn any(world: &mut World<'_>) -> Self {
        match world.call {
            Call::cuMemRetainAllocationHandle => CUdeviceptr::any(world).0 as usize as Self,
            Call::cuMemExportToShareableHandle | Call::cuMemGetHandleForAddressRange => {
                <*mut Shared>::any(world).cast()
            }
            Call::cuMemImportFromShareableHandle => world.shareable(),
            Call::cuLaunchKernel => <*mut CUdeviceptr>::any(world).cast(),
            _ if world.numbers.one_in(16) => std::ptr::null_mut(),
            _ => sink(),
        }
    }
}

/// Room for what an export writes: a descriptor, or the bytes of a fabric handle.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Shared([u8; 64]);

impl Any for Shared {
    fn any(_world: &mut World<'_>) -> Self {
        Self([0xFF; 64])
    }

    fn keep(self, world: &mut World<'_>) {
        world.keep_shared(self.0);
    }
}

impl Any for *const c_char {
    fn any(world: &mut World<'_>) -> Self {
        const TEXTS: [*const c_char; 6] = [
            c"".as_ptr(),
            c"cuMemMap".as_ptr(),
            c"cuInit_v2".as_ptr(),
            c"fill".as_ptr(),
            c"read".as_ptr(),
            c"x".as_ptr(),
        ];
        if world.numbers.one_in(16) {
            std::ptr::null()
        } else {
            TEXTS[world.numbers.below(TEXTS.len() as u64) as usize]
        }
    }
}

impl Any for *mut c_char {
    fn any(world: &mut World<'_>) -> Self {
        <*mut c_void>::any(world).cast()
    }
}

impl Any for CUhostFn {
    fn any(world: &mut World<'_>) -> Self {
        if world.numbers.one_in(8) { None } else { Some(host_function) }
    }
}

impl Any for usize {
    fn any(world: &mut World<'_>) -> Self {
        let name = world.call.name();
        if name.starts_with("cuMemcpy") {
            return world.numbers.below(BUFFER as u64) as Self;
        }
        // Of an array, where it is not of the elements to set.
        if world.argument == "count" && !name.starts_with("cuMemset") {
            return world.numbers.below(VALUES as u64 + 1) as Self;
        }
        world.size()
    }
}

impl Any for u64 {
    fn any(world: &mut World<'_>) -> Self {
        if world.numbers.one_in(8) { world.numbers.next() } else { 0 }
    }
}

impl Any for u32 {
    fn any(world: &mut World<'_>) -> Self {
        match world.numbers.below(8) {
            0 if world.call != Call::cuPointerGetAttributes => world.numbers.next() as Self,
            1..=3 => world.numbers.below(4) as Self,
            _ => world.numbers.below(2) as Self,
        }
    }
}

impl Any for u16 {
    fn any(world: &mut World<'_>) -> Self {
        world.numbers.next() as Self
    }
}

impl Any for u8 {
    fn any(world: &mut World<'_>) -> Self {
        world.numbers.next() as Self
    }
}

impl Any for i32 {
    fn any(world: &mut World<'_>) -> Self {
        match world.call {
            // The length of the buffer behind it.
            Call::cuDeviceGetName | Call::cuDeviceGetPCIBusId => world.numbers.below(BUFFER as u64) as Self - 1,
            Call::cuGetProcAddress => 10_000 + world.numbers.below(4000) as Self,
            _ if world.numbers.one_in(16) => world.numbers.next() as Self,
            _ => world.numbers.below(4) as Self - 1,
        }
    }
}

macro_rules! numbers {
    ($($ty:ident below $limit:literal,)*) => {$(
        impl Any for $ty {
            fn any(world: &mut World<'_>) -> Self {
                match world.numbers.one_in(32) {
                    true => Self(world.numbers.next() as _),
                    false => Self(world.numbers.below($limit) as _),
                }
            }
        }
    )*};
}

numbers! {
    CUdevice_attribute below 150,
    CUdevice_P2PAttribute below 6,
    CUstream_flags below 3,
    CUevent_flags below 9,
    CUstreamCaptureMode below 4,
    CUstreamCaptureStatus below 3,
    CUmemAllocationGranularity_flags below 3,
    CUmemRangeHandleType below 3,
    CUflushGPUDirectRDMAWritesTarget below 3,
    CUmemAccess_flags below 5,
    CUmemLocationType below 7,
    CUmemAllocationType below 3,
    CUmemorytype below 6,
    CUdriverProcAddressQueryResult below 3,
    CUresult below 1000,
}

impl Any for CUpointer_attribute {
    fn any(world: &mut World<'_>) -> Self {
        match world.numbers.below(8) {
            0 => Self(world.numbers.next() as u32),
            1..5 if world.call == Call::cuPointerSetAttribute => Self::SYNC_MEMOPS,
            _ => Self(world.numbers.below(24) as u32),
        }
    }
}

impl Any for CUflushGPUDirectRDMAWritesScope {
    fn any(world: &mut World<'_>) -> Self {
        Self([0, 100, 200, 300][world.numbers.below(4) as usize])
    }
}

impl Any for CUmemAllocationHandleType {
    fn any(world: &mut World<'_>) -> Self {
        let fabric = if world.numbers.one_in(4) && !world.is_number { 8 } else { 0 };
        let other = if world.numbers.one_in(16) { world.numbers.next() as u32 & !8 } else { 0 };
        Self((world.numbers.below(2) as u32) | fabric | other)
    }
}

impl Any for CUdevice {
    fn any(world: &mut World<'_>) -> Self {
        Self(if world.numbers.one_in(8) { i32::any(world) } else { world.numbers.one_in(4).into() })
    }
}

macro_rules! opaque {
    ($($ty:ident: $list:ident,)*) => {$(
        impl Any for $ty {
            fn any(world: &mut World<'_>) -> Self {
                Self(std::ptr::without_provenance_mut(world.like(|seen| &seen.$list) as usize))
            }

            fn keep(self, world: &mut World<'_>) {
                world.keep(|seen| &mut seen.$list, self.0.addr() as u64);
            }
        }
    )*};
}

opaque! {
    CUcontext: contexts,
    CUevent: events,
    CUgraph: graphs,
    CUgraphNode: nodes,
    CUgraphExec: executables,
    CUuserObject: objects,
    CUmodule: modules,
}

impl Any for CUfunction {
    /// One of those that were given, as what is near it may be one that spins.
    fn any(world: &mut World<'_>) -> Self {
        Self(std::ptr::without_provenance_mut(world.one_of(|seen| &seen.functions) as usize))
    }

    fn keep(self, world: &mut World<'_>) {
        world.keep(|seen| &mut seen.functions, self.0.addr() as u64);
    }
}

impl Any for CUstream {
    fn any(world: &mut World<'_>) -> Self {
        match world.numbers.below(8) {
            token @ 0..3 => Self(std::ptr::without_provenance_mut(token as usize)),
            _ => Self(std::ptr::without_provenance_mut(world.like(|seen| &seen.streams) as usize)),
        }
    }

    fn keep(self, world: &mut World<'_>) {
        world.keep(|seen| &mut seen.streams, self.0.addr() as u64);
    }
}

impl Any for CUmemGenericAllocationHandle {
    fn any(world: &mut World<'_>) -> Self {
        Self(world.like(|seen| &seen.handles))
    }

    fn keep(self, world: &mut World<'_>) {
        world.keep(|seen| &mut seen.handles, self.0);
    }
}

impl Any for CUdeviceptr {
    fn any(world: &mut World<'_>) -> Self {
        match world.call {
            // These take any other address for a host pointer.
            Call::cuMemcpy | Call::cuMemcpyAsync => world.unified(),
            _ => Self(world.like(|seen| &seen.addresses)),
        }
    }

    fn keep(self, world: &mut World<'_>) {
        world.keep(|seen| &mut seen.addresses, self.0);
    }
}

impl Any for CUmemLocation {
    fn any(world: &mut World<'_>) -> Self {
        match world.numbers.below(4) {
            0 => Self { location_type: CUmemLocationType::any(world), id: i32::any(world) },
            1 => Self::host_numa(world.numbers.below(4) as i32),
            _ => Self::device(world.numbers.below(2) as i32),
        }
    }
}

impl Any for CUmemAllocationProp {
    fn any(world: &mut World<'_>) -> Self {
        let mut properties = Self::pinned(CUmemLocation::any(world), CUmemAllocationHandleType::any(world));
        if world.numbers.one_in(16) {
            properties.allocation_type = CUmemAllocationType::any(world);
            properties.alloc_flags.compression_type = u8::any(world);
            properties.alloc_flags.usage = u16::any(world);
        }
        properties
    }
}

impl Any for CUmemAccessDesc {
    fn any(world: &mut World<'_>) -> Self {
        let flags = if world.numbers.one_in(2) { CUmemAccess_flags::READWRITE } else { CUmemAccess_flags::any(world) };
        Self { location: CUmemLocation::any(world), flags }
    }
}

impl Any for CUuuid {
    fn any(_world: &mut World<'_>) -> Self {
        Self::default()
    }
}

impl Any for CUDA_HOST_NODE_PARAMS {
    fn any(world: &mut World<'_>) -> Self {
        Self { host_fn: CUhostFn::any(world), user_data: sink() }
    }
}

impl Any for CUDA_MEMSET_NODE_PARAMS {
    fn any(world: &mut World<'_>) -> Self {
        Self {
            dst: CUdeviceptr::any(world),
            pitch: world.size(),
            value: u32::any(world),
            element_size: [1, 2, 4, 3][world.numbers.below(4) as usize],
            width: world.size() / 8,
            height: if world.numbers.one_in(8) { world.size() } else { 1 },
        }
    }
}

impl Any for CUDA_MEMCPY3D {
    fn any(world: &mut World<'_>) -> Self {
        // Offset and width together stay within a buffer.
        let half = |world: &mut World<'_>| world.numbers.below(BUFFER as u64 / 2) as usize;
        let one = |world: &mut World<'_>| if world.numbers.one_in(8) { world.size() } else { 1 };
        let x = |world: &mut World<'_>| if world.numbers.one_in(8) { half(world) } else { 0 };
        Self {
            src_x_in_bytes: x(world),
            src_y: one(world) & !1,
            src_z: 0,
            src_lod: 0,
            src_memory_type: CUmemorytype::any(world),
            src_host: source(),
            src_device: world.unified(),
            src_array: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            src_pitch: world.size(),
            src_height: one(world),
            dst_x_in_bytes: x(world),
            dst_y: 0,
            dst_z: one(world) & !1,
            dst_lod: 0,
            dst_memory_type: CUmemorytype::any(world),
            dst_host: sink(),
            dst_device: world.unified(),
            dst_array: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dst_pitch: world.size(),
            dst_height: one(world),
            width_in_bytes: half(world),
            height: 1,
            depth: 1,
        }
    }
}

impl World<'_> {
    /// What an import is given: a number, most often of an exported descriptor, or the bytes of a fabric handle.
    fn shareable(&mut self) -> *mut c_void {
        self.is_number = self.numbers.one_in(2);
        if !self.is_number {
            return match self.fabric() {
                Some(bytes) => {
                    let place = Box::into_raw(Box::new(Shared(bytes)));
                    self.written.push(Box::new(move |_, _| {
                        // SAFETY: it was made above, and the call that had the pointer has returned.
                        drop(unsafe { Box::from_raw(place) });
                    }));
                    place.cast()
                }
                None => <*mut Shared>::any(self).cast(),
            };
        }
        let number = match self.exported() {
            Some(exported) if !self.numbers.one_in(4) => exported.as_raw_fd() as usize,
            _ => self.numbers.next() as usize,
        };
        std::ptr::without_provenance_mut(number)
    }
}
