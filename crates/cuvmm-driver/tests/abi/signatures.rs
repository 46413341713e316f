//! The parameters of every call of the list, one by one, against the function that the binding has for it.
//!
//! `cudarc` has every export that the list names but one; `cuda-driver-sys` has those of CUDA 10.2. Where a
//! binding only has another ABI of a call, that is said next to it. The functions are only ever named, in
//! closures that nobody calls, so that nothing asks the linker for them.

use std::ffi::{c_char, c_void};
use std::mem::{align_of, size_of};

use cuda_driver_sys as old;
use cudarc::driver::sys as new;
use cuvmm_driver::sys::{self as ours, *};

#[path = "../../src/list.rs"]
mod list;

/// What a parameter is, as far as a call can tell.
trait Shape {
    fn shape() -> String;
}

macro_rules! shapes {
    (number: $($ty:ty)*) => {$(
        impl Shape for $ty {
            fn shape() -> String {
                stringify!($ty).to_owned()
            }
        }
    )*};
    (wraps: $($ty:ty = $inner:ty,)*) => {$(
        impl Shape for $ty {
            fn shape() -> String {
                assert_eq!((size_of::<Self>(), align_of::<Self>()), (size_of::<$inner>(), align_of::<$inner>()));
                <$inner>::shape()
            }
        }
    )*};
    // Of one name in every binding.
    (named $module:ident: $($ty:ident)*) => {$(
        impl Shape for $module::$ty {
            fn shape() -> String {
                format!("{} of {} bytes", stringify!($ty), size_of::<Self>())
            }
        }
    )*};
    (handle: $($ours:ident = $theirs:ident,)*) => {$(
        impl Shape for $ours {
            fn shape() -> String {
                assert_eq!((size_of::<Self>(), align_of::<Self>()), (size_of::<usize>(), align_of::<usize>()));
                concat!("*mut ", stringify!($theirs)).to_owned()
            }
        }
    )*};
    (opaque $module:ident: $($ty:ident)*) => {$(
        impl Shape for $module::$ty {
            fn shape() -> String {
                stringify!($ty).to_owned()
            }
        }
    )*};
}

shapes!(number: i8 u8 u16 u32 u64 i32 usize);
shapes!(wraps: CUdevice = i32, CUdeviceptr = u64, CUmemGenericAllocationHandle = u64, CUstream_flags = u32,
    CUevent_flags = u32,);
shapes!(handle: CUcontext = CUctx_st, CUstream = CUstream_st, CUevent = CUevent_st, CUgraph = CUgraph_st,
    CUgraphNode = CUgraphNode_st, CUgraphExec = CUgraphExec_st, CUuserObject = CUuserObject_st,
    CUmodule = CUmod_st, CUfunction = CUfunc_st,);

macro_rules! shapes_of_binding {
    ($module:ident) => {
        shapes!(named $module: CUresult CUdevice_attribute CUdevice_P2PAttribute CUstreamCaptureStatus
            CUstreamCaptureMode CUpointer_attribute CUmemAllocationHandleType CUmemAllocationGranularity_flags
            CUuuid CUmemAllocationProp CUmemAccessDesc CUmemLocation CUDA_MEMCPY3D CUDA_MEMSET_NODE_PARAMS
            CUDA_HOST_NODE_PARAMS);
    };
}

shapes_of_binding!(ours);
shapes_of_binding!(old);
shapes_of_binding!(new);
shapes!(named ours: CUmemRangeHandleType CUflushGPUDirectRDMAWritesTarget CUflushGPUDirectRDMAWritesScope
    CUdriverProcAddressQueryResult);
shapes!(named new: CUmemRangeHandleType CUflushGPUDirectRDMAWritesTarget CUflushGPUDirectRDMAWritesScope
    CUdriverProcAddressQueryResult);
shapes!(opaque old: CUctx_st CUstream_st CUevent_st CUgraph_st CUgraphNode_st CUgraphExec_st CUmod_st CUfunc_st);
shapes!(opaque new: CUctx_st CUstream_st CUevent_st CUgraph_st CUgraphNode_st CUgraphExec_st CUuserObject_st CUmod_st
    CUfunc_st);

impl Shape for c_void {
    fn shape() -> String {
        "void".to_owned()
    }
}

impl<T: Shape> Shape for *const T {
    fn shape() -> String {
        format!("*const {}", T::shape())
    }
}

impl<T: Shape> Shape for *mut T {
    fn shape() -> String {
        format!("*mut {}", T::shape())
    }
}

impl Shape for CUhostFn {
    fn shape() -> String {
        "void (*)(*mut void)".to_owned()
    }
}

/// What a function takes.
trait Signature {
    fn parameters() -> Vec<String>;
}

macro_rules! signatures {
    ($($parameter:ident)*) => {
        impl<R: Shape $(, $parameter: Shape)*> Signature for unsafe fn($($parameter),*) -> R {
            fn parameters() -> Vec<String> {
                vec![R::shape() $(, $parameter::shape())*]
            }
        }

        impl<R: Shape $(, $parameter: Shape)*> Signature for unsafe extern "C" fn($($parameter),*) -> R {
            fn parameters() -> Vec<String> {
                vec![R::shape() $(, $parameter::shape())*]
            }
        }
    };
}

signatures!();
signatures!(A);
signatures!(A B);
signatures!(A B C);
signatures!(A B C D);
signatures!(A B C D E);
signatures!(A B C D E F);
signatures!(A B C D E F G H I J K);

/// Result and parameters of the function that a closure would give if it were called.
fn parameters<F: Signature>(_: impl FnOnce() -> F) -> Vec<String> {
    F::parameters()
}

/// A function's path and parameters. Their number has to be that of ours, or this doesn't compile.
macro_rules! function {
    ($module:ident::$name:ident [$($convention:tt)*] ($($arg:ident)*)) => {
        Some((stringify!($name), parameters(|| -> unsafe $($convention)* fn($(hole!($arg)),*) -> _ { $module::$name })))
    };
}

macro_rules! hole {
    ($arg:ident) => {
        _
    };
}

/// The current name of a call's function, where it is not the call's own.
macro_rules! exported {
    ($m:ident cuGetProcAddress $c:tt $a:tt) => { function!($m::cuGetProcAddress_v2 $c $a) };
    ($m:ident cuDeviceGetUuid $c:tt $a:tt) => { function!($m::cuDeviceGetUuid_v2 $c $a) };
    ($m:ident cuDeviceTotalMem $c:tt $a:tt) => { function!($m::cuDeviceTotalMem_v2 $c $a) };
    ($m:ident cuDevicePrimaryCtxRelease $c:tt $a:tt) => { function!($m::cuDevicePrimaryCtxRelease_v2 $c $a) };
    ($m:ident cuDevicePrimaryCtxReset $c:tt $a:tt) => { function!($m::cuDevicePrimaryCtxReset_v2 $c $a) };
    ($m:ident cuCtxPushCurrent $c:tt $a:tt) => { function!($m::cuCtxPushCurrent_v2 $c $a) };
    ($m:ident cuCtxPopCurrent $c:tt $a:tt) => { function!($m::cuCtxPopCurrent_v2 $c $a) };
    ($m:ident cuCtxDestroy $c:tt $a:tt) => { function!($m::cuCtxDestroy_v2 $c $a) };
    ($m:ident cuStreamDestroy $c:tt $a:tt) => { function!($m::cuStreamDestroy_v2 $c $a) };
    ($m:ident cuStreamBeginCapture $c:tt $a:tt) => { function!($m::cuStreamBeginCapture_v2 $c $a) };
    ($m:ident cuEventDestroy $c:tt $a:tt) => { function!($m::cuEventDestroy_v2 $c $a) };
    ($m:ident cuMemGetInfo $c:tt $a:tt) => { function!($m::cuMemGetInfo_v2 $c $a) };
    ($m:ident cuMemAlloc $c:tt $a:tt) => { function!($m::cuMemAlloc_v2 $c $a) };
    ($m:ident cuMemFree $c:tt $a:tt) => { function!($m::cuMemFree_v2 $c $a) };
    ($m:ident cuMemcpyHtoD $c:tt $a:tt) => { function!($m::cuMemcpyHtoD_v2 $c $a) };
    ($m:ident cuMemcpyDtoH $c:tt $a:tt) => { function!($m::cuMemcpyDtoH_v2 $c $a) };
    ($m:ident cuMemcpyDtoD $c:tt $a:tt) => { function!($m::cuMemcpyDtoD_v2 $c $a) };
    ($m:ident cuMemcpyHtoDAsync $c:tt $a:tt) => { function!($m::cuMemcpyHtoDAsync_v2 $c $a) };
    ($m:ident cuMemcpyDtoHAsync $c:tt $a:tt) => { function!($m::cuMemcpyDtoHAsync_v2 $c $a) };
    ($m:ident cuMemcpyDtoDAsync $c:tt $a:tt) => { function!($m::cuMemcpyDtoDAsync_v2 $c $a) };
    ($m:ident cuMemsetD8 $c:tt $a:tt) => { function!($m::cuMemsetD8_v2 $c $a) };
    ($m:ident cuMemsetD16 $c:tt $a:tt) => { function!($m::cuMemsetD16_v2 $c $a) };
    ($m:ident cuMemsetD32 $c:tt $a:tt) => { function!($m::cuMemsetD32_v2 $c $a) };
    ($m:ident cuMemGetAddressRange $c:tt $a:tt) => { function!($m::cuMemGetAddressRange_v2 $c $a) };
    ($m:ident $name:ident $c:tt $a:tt) => { function!($m::$name $c $a) };
}

/// The function of CUDA 13.2.
macro_rules! newer {
    // It has one parameter more there, for the data of edges, before the last.
    (cuStreamGetCaptureInfo $a:tt) => { None };
    ($name:ident $a:tt) => { exported!(new $name [] $a) };
}

/// The function of CUDA 10.2.
macro_rules! older {
    // The same parameters under the name of the first ABI, which differs in effect alone.
    (cuDeviceGetUuid $a:tt) => { function!(old::cuDeviceGetUuid [extern "C"] $a) };
    (cuDevicePrimaryCtxRelease $a:tt) => { function!(old::cuDevicePrimaryCtxRelease [extern "C"] $a) };
    (cuDevicePrimaryCtxReset $a:tt) => { function!(old::cuDevicePrimaryCtxReset [extern "C"] $a) };
    // It ends after the id there.
    (cuStreamGetCaptureInfo $a:tt) => { None };
    // Later ones.
    (cuGetProcAddress $a:tt) => { None };
    (cuStreamGetDevice $a:tt) => { None };
    (cuFlushGPUDirectRDMAWrites $a:tt) => { None };
    (cuMemRetainAllocationHandle $a:tt) => { None };
    (cuMemGetHandleForAddressRange $a:tt) => { None };
    (cuUserObjectCreate $a:tt) => { None };
    (cuUserObjectRetain $a:tt) => { None };
    (cuUserObjectRelease $a:tt) => { None };
    (cuGraphRetainUserObject $a:tt) => { None };
    (cuGraphReleaseUserObject $a:tt) => { None };
    (cuGraphInstantiateWithFlags $a:tt) => { None };
    ($name:ident $a:tt) => { exported!(old $name [extern "C"] $a) };
}

/// A call of the list with the functions that the bindings have for it.
struct Row {
    name: &'static str,
    export: &'static str,
    ours: Vec<String>,
    new: Option<(&'static str, Vec<String>)>,
    old: Option<(&'static str, Vec<String>)>,
}

macro_rules! rows {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        fn rows() -> Vec<Row> {
            vec![$(Row {
                name: stringify!($name),
                export: $export,
                ours: vec![CUresult::shape() $(, <$ty>::shape())*],
                new: newer!($name ($($arg)*)),
                old: older!($name ($($arg)*)),
            },)*]
        }
    };
}

list::for_each_call!(rows);

#[test]
fn parameters_are_those_of_cuda_13() {
    let mut compared = 0;
    for row in rows() {
        if let Some((name, theirs)) = row.new {
            assert_eq!(row.ours, theirs, "{}", row.name);
            assert_eq!(row.export, name, "the export of {}", row.name);
            compared += 1;
        }
    }
    assert_eq!(compared, rows().len() - 1);
}

#[test]
fn parameters_are_those_of_cuda_10() {
    let mut compared = 0;
    for row in rows() {
        if let Some((_, theirs)) = row.old {
            assert_eq!(row.ours, theirs, "{}", row.name);
            compared += 1;
        }
    }
    assert_eq!(compared, rows().len() - 12);
}

/// Neither binding has this ABI: CUDA 11.3 to 12.2 have it, as cudaTypedefs.h of CUDA 12.9 says.
#[test]
fn capture_info_is_that_of_cuda_11_3() {
    let row = rows().into_iter().find(|row| row.name == "cuStreamGetCaptureInfo");
    let expected = [
        &<new::CUresult as Shape>::shape(),
        "*mut CUstream_st",
        &<*mut new::CUstreamCaptureStatus as Shape>::shape(),
        "*mut u64",
        "*mut *mut CUgraph_st",
        "*mut *const *mut CUgraphNode_st",
        "*mut usize",
    ]
    .map(str::to_owned);
    assert_eq!(row.map(|row| (row.export, row.ours)), Some(("cuStreamGetCaptureInfo_v2", expected.to_vec())));
}
