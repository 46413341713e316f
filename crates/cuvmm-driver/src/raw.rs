//! The calls themselves: [`Call`] names them, [`RawDriver`] has one C-shaped method for each.
//!
//! # Safety
//! Unsafe only in that the methods are, as the C functions are, and in passing them on unchanged.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;

use crate::list::for_each_call;
use crate::sys::*;

/// One entry point, as cuGetProcAddress and the library's export table know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Symbol {
    /// The call.
    pub call: Call,
    /// The base name, for cuGetProcAddress.
    pub name: &'static CStr,
    /// The exported name, for dlsym.
    pub export: &'static CStr,
    /// The CUDA version of the signature: what cuGetProcAddress is to be asked for.
    pub version: CudaVersion,
    /// Whether no driver is of use without it.
    pub core: bool,
}

/// A parameter of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its type, as [`RawDriver`] writes it: `usize`, `CUdeviceptr`, `*mut i32`.
    pub type_name: &'static str,
}

macro_rules! declare {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// The name of a call: what errors, hooks and logs say.
        #[allow(non_camel_case_types, reason = "the variants are the driver's own names")]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Call {
            $(
                #[doc = concat!("`", stringify!($name), "`")]
                $name,
            )*
        }

        impl Call {
            /// Every call, in the order of the list.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The base name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Its parameters, in order: what the arguments of an [`Invocation`](crate::Invocation) are.
            ///
            /// ```
            /// let parameters = cuvmm_driver::Call::cuMemMap.parameters();
            /// assert_eq!(parameters[1].name, "size");
            /// assert_eq!(parameters[1].type_name, "usize");
            /// ```
            pub const fn parameters(self) -> &'static [Parameter] {
                match self {
                    $(Self::$name => &[$(Parameter { name: stringify!($arg), type_name: stringify!($ty) }),*],)*
                }
            }

            /// Where and how a loader finds it.
            pub const fn symbol(self) -> Symbol {
                match self {
                    $(Self::$name => Symbol {
                        call: self,
                        name: c_name(concat!(stringify!($name), "\0")),
                        export: c_name(concat!($export, "\0")),
                        version: CudaVersion($version),
                        core: is_core!($kind),
                    },)*
                }
            }
        }

        /// A CUDA driver: one C-shaped method a call.
        ///
        /// A method that isn't overridden answers [`CUresult::NOT_SUPPORTED`], so that a partial stand-in is
        /// short.
        ///
        /// # Safety
        /// What is built on this trait is safe only as far as each method does what the CUDA driver API manual
        /// says of the call: success means that the effect took place and that every output was written, an
        /// address reserved is nobody else's, and so on. An implementation that lies causes undefined behaviour.
        pub unsafe trait RawDriver: Send + Sync {
            /// Whether this driver has the call at all. Where it has not, the method answers
            /// [`CUresult::NOT_SUPPORTED`].
            fn provides(&self, call: Call) -> bool {
                let _ = call;
                true
            }

            $(
                #[doc = concat!("`", stringify!($name), "`, in the signature of CUDA ", stringify!($version), ".")]
                ///
                /// # Safety
                /// The CUDA driver API manual's conditions for the call hold: pointers valid for what it reads and
                /// writes, handles alive and of this driver.
                #[allow(non_snake_case, reason = "the driver's own name")]
                #[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
                unsafe fn $name(&self $(, $arg: $ty)*) -> CUresult {
                    $(let _ = $arg;)*
                    CUresult::NOT_SUPPORTED
                }
            )*
        }

        // SAFETY: every call is passed on unchanged to a driver that keeps the trait's promise.
        unsafe impl<D: RawDriver + ?Sized> RawDriver for Arc<D> {
            fn provides(&self, call: Call) -> bool {
                D::provides(self, call)
            }

            $(
                unsafe fn $name(&self $(, $arg: $ty)*) -> CUresult {
                    // SAFETY: the caller's promises are passed on with the arguments.
                    unsafe { D::$name(self $(, $arg)*) }
                }
            )*
        }
    };
}

macro_rules! is_core {
    (core) => {
        true
    };
    (optional) => {
        false
    };
}

/// The C string of a literal that ends in its only NUL.
const fn c_name(with_nul: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(with_nul.as_bytes()) {
        Ok(name) => name,
        Err(_) => unreachable!(),
    }
}

for_each_call!(declare);

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
