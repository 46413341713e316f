//! A decorator that sees each call before and after: for faults, counts and logs in front of any driver.
//!
//! # Safety
//! Every call is passed on unchanged or not at all, and a result only ever becomes a failure.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_void};

use crate::list::for_each_call;
use crate::raw::{Call, RawDriver};
use crate::sys::*;

/// A failing result code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure(CUresult);

impl Failure {
    /// The failure with that code; none for success.
    pub const fn new(code: CUresult) -> Option<Self> {
        if code.0 == 0 { None } else { Some(Self(code)) }
    }

    /// The code.
    pub const fn code(self) -> CUresult {
        self.0
    }
}

/// A call that is about to be made, or was.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Invocation<'a> {
    /// Which call.
    pub call: Call,
    /// Its arguments in order, each as its bits: numbers as they are, pointers as addresses, with their provenance
    /// exposed: what a call wrote can be read through
    /// [`with_exposed_provenance`](std::ptr::with_exposed_provenance) after it succeeded.
    pub arguments: &'a [u64],
}

/// What sees the calls of a [`Hooked`] driver. It is called on the caller's thread, in the middle of what that does:
/// it must not call back into the value whose call it sees.
pub trait Hook: Send + Sync {
    /// Sees a call before it is made. A failure given is its result, and the call isn't made.
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        let _ = invocation;
        None
    }

    /// Sees a call that was made, with its result. A failure given is the result that the caller sees.
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        let _ = (invocation, result);
        None
    }
}

impl<H: Hook + ?Sized> Hook for std::sync::Arc<H> {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        H::before(self, invocation)
    }

    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        H::after(self, invocation, result)
    }
}

/// A driver whose calls a hook sees. It may turn a result into a failure, never into a success.
#[derive(Debug)]
pub struct Hooked<D, H> {
    driver: D,
    hook: H,
}

impl<D: RawDriver, H: Hook> Hooked<D, H> {
    /// Puts `hook` in front of `driver`.
    pub fn new(driver: D, hook: H) -> Self {
        Self { driver, hook }
    }

    /// The hook.
    pub fn hook(&self) -> &H {
        &self.hook
    }

    #[inline]
    fn pass(&self, invocation: Invocation<'_>, call: impl FnOnce(&D) -> CUresult) -> CUresult {
        if let Some(failure) = self.hook.before(&invocation) {
            return failure.code();
        }
        let result = call(&self.driver);
        self.hook.after(&invocation, result).map_or(result, Failure::code)
    }
}

/// The bits of an argument.
trait Bits {
    fn bits(&self) -> u64;
}

macro_rules! bits {
    (number: $($ty:ty),*) => {$(impl Bits for $ty { fn bits(&self) -> u64 { *self as u64 } })*};
    (newtype: $($ty:ty),*) => {$(impl Bits for $ty { fn bits(&self) -> u64 { self.0 as u64 } })*};
}

bits!(number: i32, u8, u16, u32, u64, usize);
bits!(newtype: CUresult, CUdevice, CUdeviceptr, CUmemGenericAllocationHandle, CUdevice_attribute,
    CUdevice_P2PAttribute, CUpointer_attribute, CUstream_flags, CUevent_flags, CUstreamCaptureMode,
    CUmemAllocationHandleType, CUmemAllocationGranularity_flags, CUmemRangeHandleType,
    CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope, CUcontext, CUstream, CUevent, CUgraph,
    CUgraphNode, CUgraphExec, CUuserObject, CUmodule, CUfunction);

impl<T> Bits for *const T {
    fn bits(&self) -> u64 {
        self.expose_provenance() as u64
    }
}

impl<T> Bits for *mut T {
    fn bits(&self) -> u64 {
        self.expose_provenance() as u64
    }
}

impl Bits for CUhostFn {
    fn bits(&self) -> u64 {
        self.map_or(0, |function| function as usize as u64)
    }
}

macro_rules! declare_hooked {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        // SAFETY: a call is made unchanged with its own result, or it is a failure: outputs of a failed call are
        // never read, so what the driver promised still holds.
        unsafe impl<D: RawDriver, H: Hook> RawDriver for Hooked<D, H> {
            fn provides(&self, call: Call) -> bool {
                self.driver.provides(call)
            }

            $(
                unsafe fn $name(&self $(, $arg: $ty)*) -> CUresult {
                    let arguments = [$($arg.bits()),*];
                    self.pass(Invocation { call: Call::$name, arguments: &arguments }, |driver| {
                        // SAFETY: the caller's promises are passed on with the arguments.
                        unsafe { driver.$name($($arg),*) }
                    })
                }
            )*
        }
    };
}

for_each_call!(declare_hooked);
