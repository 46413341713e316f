//! Size, alignment and field offsets of every struct that crosses the boundary.

use std::mem::{align_of, offset_of, size_of};

use cuda_driver_sys as old;
use cudarc::driver::sys as new;
use cuvmm_driver::sys::*;

/// Compares a struct of ours with one of a binding's: each field of ours with that of theirs in the same place.
macro_rules! same_layout {
    ($ours:ident = $theirs:ty { $($field:ident = $other:ident,)* }) => {
        assert_eq!(
            (size_of::<$ours>(), align_of::<$ours>()),
            (size_of::<$theirs>(), align_of::<$theirs>()),
            "size and alignment of {}",
            stringify!($ours),
        );
        $(assert_eq!(
            offset_of!($ours, $field),
            offset_of!($theirs, $other),
            "offset of {} in {}",
            stringify!($field),
            stringify!($ours),
        );)*
        // Names every field of ours, so that one that is added has to be compared.
        let _ = |all: $ours| {
            let $ours { $($field: _,)* } = all;
        };
    };
}

#[test]
fn identity_has_the_same_layout() {
    same_layout!(CUuuid = old::CUuuid { bytes = bytes, });
    same_layout!(CUuuid = new::CUuuid { bytes = bytes, });
    same_layout!(CUmemFabricHandle = new::CUmemFabricHandle { data = data, });
}

/// The id is in a union since CUDA 13.2, in the place where it always was.
#[test]
fn location_and_access_have_the_same_layout() {
    same_layout!(CUmemLocation = old::CUmemLocation { location_type = type_, id = id, });
    same_layout!(CUmemLocation = new::CUmemLocation { location_type = type_, id = __bindgen_anon_1, });
    assert_eq!(size_of::<new::CUmemLocation_st__bindgen_ty_1>(), size_of::<i32>());
    same_layout!(CUmemAccessDesc = old::CUmemAccessDesc { location = location, flags = flags, });
    same_layout!(CUmemAccessDesc = new::CUmemAccessDesc { location = location, flags = flags, });
}

/// In CUDA 10.2 the flags were one reserved number of eight bytes.
#[test]
fn allocation_properties_have_the_same_layout() {
    same_layout!(CUmemAllocationProp = old::CUmemAllocationProp {
        allocation_type = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_metadata = win32HandleMetaData,
        alloc_flags = reserved,
    });
    same_layout!(CUmemAllocationProp = new::CUmemAllocationProp {
        allocation_type = type_,
        requested_handle_types = requestedHandleTypes,
        location = location,
        win32_handle_metadata = win32HandleMetaData,
        alloc_flags = allocFlags,
    });
    same_layout!(CUmemAllocationPropFlags = new::CUmemAllocationProp_st__bindgen_ty_1 {
        compression_type = compressionType,
        gpu_direct_rdma_capable = gpuDirectRDMACapable,
        usage = usage,
        reserved = reserved,
    });
}

macro_rules! same_node_layouts {
    ($binding:ident) => {
        same_layout!(CUDA_MEMSET_NODE_PARAMS = $binding::CUDA_MEMSET_NODE_PARAMS {
            dst = dst,
            pitch = pitch,
            value = value,
            element_size = elementSize,
            width = width,
            height = height,
        });
        same_layout!(CUDA_HOST_NODE_PARAMS = $binding::CUDA_HOST_NODE_PARAMS {
            host_fn = fn_,
            user_data = userData,
        });
        same_layout!(CUDA_MEMCPY3D = $binding::CUDA_MEMCPY3D {
            src_x_in_bytes = srcXInBytes,
            src_y = srcY,
            src_z = srcZ,
            src_lod = srcLOD,
            src_memory_type = srcMemoryType,
            src_host = srcHost,
            src_device = srcDevice,
            src_array = srcArray,
            reserved0 = reserved0,
            src_pitch = srcPitch,
            src_height = srcHeight,
            dst_x_in_bytes = dstXInBytes,
            dst_y = dstY,
            dst_z = dstZ,
            dst_lod = dstLOD,
            dst_memory_type = dstMemoryType,
            dst_host = dstHost,
            dst_device = dstDevice,
            dst_array = dstArray,
            reserved1 = reserved1,
            dst_pitch = dstPitch,
            dst_height = dstHeight,
            width_in_bytes = WidthInBytes,
            height = Height,
            depth = Depth,
        });
    };
}

#[test]
fn node_parameters_have_the_same_layout() {
    same_node_layouts!(old);
    same_node_layouts!(new);
}

/// Numbers and handles are what C has in their place: nothing more is passed than their bits.
#[test]
fn numbers_and_handles_are_as_wide() {
    macro_rules! as_wide {
        ($($ours:ident)*) => {$(
            assert_eq!(size_of::<$ours>(), size_of::<old::$ours>(), stringify!($ours));
            assert_eq!(size_of::<$ours>(), size_of::<new::$ours>(), stringify!($ours));
            assert_eq!(align_of::<$ours>(), align_of::<new::$ours>(), stringify!($ours));
        )*};
    }
    as_wide!(CUdeviceptr CUmemGenericAllocationHandle CUdevice CUresult CUcontext CUstream CUevent CUgraph CUgraphNode
        CUgraphExec CUmodule CUfunction CUhostFn CUmemAllocationType CUmemAllocationHandleType CUmemLocationType
        CUmemAccess_flags CUmemAllocationGranularity_flags CUstreamCaptureStatus CUstreamCaptureMode CUstream_flags
        CUevent_flags CUmemorytype CUdevice_P2PAttribute CUdevice_attribute CUpointer_attribute);
    assert_eq!(size_of::<CUuserObject>(), size_of::<new::CUuserObject>());
    assert_eq!(size_of::<CUmemRangeHandleType>(), size_of::<new::CUmemRangeHandleType>());
}
