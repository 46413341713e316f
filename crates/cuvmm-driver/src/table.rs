//! The table of a real driver's entry points, and where they come from.
//!
//! # Safety
//! Function pointers are made from addresses that a source vouches for, and called as the list declares them.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsString, c_char, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::list::for_each_call;
use crate::raw::{Call, RawDriver, Symbol};
use crate::sys::*;

/// The name that the driver's library has on every Linux.
const SONAME: &str = "libcuda.so.1";
/// Where the library is on WSL when the loader's own path lacks it.
const WSL_PATH: &str = "/usr/lib/wsl/lib/libcuda.so.1";

/// Why no driver could be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The library couldn't be opened: there is no NVIDIA driver here, or it can't be found.
    #[error("failed to open {}: there is no NVIDIA driver, or it is not where it is looked for", library.display())]
    LibraryNotFound {
        /// What was tried.
        library: PathBuf,
        /// What the loader said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The library lacks a call that everything else needs.
    #[error("{} has no {symbol} (CUDA {since}): it is too old a CUDA driver, or none", library.display())]
    MissingSymbol {
        /// The call.
        symbol: Call,
        /// The CUDA version of its signature.
        since: CudaVersion,
        /// Where it was looked for.
        library: PathBuf,
    },
    /// The driver was loaded and then refused to start; 100 (no device) is the usual reason.
    #[error("the driver was loaded but does not start")]
    Init(#[from] crate::Error),
}

/// A core entry point that a source doesn't have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no {} (CUDA {})", symbol.call, symbol.version)]
pub struct MissingSymbol {
    /// The entry point.
    pub symbol: Symbol,
}

/// Declares, from the list, the table, what stands in for absent entry points, its calls, and the C entry points that
/// serve a driver of ours.
macro_rules! declare_table {
    ($($kind:ident $name:ident $export:literal $version:literal ($($arg:ident: $ty:ty),*);)*) => {
        /// The entry points of a loaded driver.
        #[allow(non_snake_case, reason = "the fields are the driver's own names")]
        pub struct Table {
            provided: Box<[bool]>,
            $($name: unsafe extern "C" fn($($ty),*) -> CUresult,)*
        }

        /// What stands in for an optional entry point that the driver lacks.
        mod absent {
            use super::*;
            $(
                #[allow(non_snake_case, reason = "the driver's own name")]
                pub(super) unsafe extern "C" fn $name($(_: $ty),*) -> CUresult {
                    CUresult::NOT_SUPPORTED
                }
            )*
        }

        impl Table {
            /// Fills the table from `source`, which gives an entry point's address, or null where it has none.
            ///
            /// # Safety
            /// An address given is that of a function with the symbol's signature, of a driver that keeps the
            /// promise of [`RawDriver`], and stays callable for ever.
            ///
            /// # Errors
            /// [`MissingSymbol`] for the first core entry point that `source` has not.
            pub unsafe fn from_source(
                source: &mut dyn FnMut(&Symbol) -> *const c_void,
            ) -> Result<Self, MissingSymbol> {
                let mut provided = vec![true; Call::ALL.len()].into_boxed_slice();
                Ok(Self {
                    $($name: {
                        let symbol = Call::$name.symbol();
                        let address = source(&symbol);
                        if !address.is_null() {
                            // SAFETY: the source promises that a function of this signature is there.
                            unsafe {
                                std::mem::transmute::<*const c_void, unsafe extern "C" fn($($ty),*) -> CUresult>(
                                    address,
                                )
                            }
                        } else if symbol.core {
                            return Err(MissingSymbol { symbol });
                        } else {
                            provided[Call::$name as usize] = false;
                            absent::$name
                        }
                    },)*
                    provided,
                })
            }
        }

        // SAFETY: each method calls the function of that name, which the source vouched for.
        unsafe impl RawDriver for Table {
            fn provides(&self, call: Call) -> bool {
                self.provided.get(call as usize).copied().unwrap_or(false)
            }

            $(
                unsafe fn $name(&self $(, $arg: $ty)*) -> CUresult {
                    // SAFETY: the caller keeps the call's conditions.
                    unsafe { (self.$name)($($arg),*) }
                }
            )*
        }

        /// The C entry point that serves `call` from `D`: what a library that stands in for libcuda exports, and
        /// a source for [`Table::from_source`].
        pub fn entry_point<D: Served>(call: Call) -> *const c_void {
            match call {
                $(Call::$name => {
                    /// The entry point.
                    #[allow(non_snake_case, reason = "the driver's own name")]
                    #[allow(clippy::too_many_arguments, reason = "the driver's own signature")]
                    unsafe extern "C" fn $name<D: Served>($($arg: $ty),*) -> CUresult {
                        // SAFETY: the C caller keeps the call's conditions.
                        unsafe { D::served().$name($($arg),*) }
                    }
                    $name::<D> as unsafe extern "C" fn($($ty),*) -> CUresult as *const c_void
                })*
            }
        }
    };
}

/// A driver that [`entry_point`] can reach from a C function, which carries no value of its own.
pub trait Served: 'static {
    /// The driver.
    fn served() -> &'static dyn RawDriver;
}

for_each_call!(declare_table);

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let missing: Vec<Call> = Call::ALL.iter().copied().filter(|call| !self.provides(*call)).collect();
        f.debug_struct("Table").field("missing", &missing).finish_non_exhaustive()
    }
}

impl Table {
    /// Opens `libcuda.so.1` and fills the table from it. The library is never unloaded: driver threads and
    /// callbacks outlive every value of ours.
    ///
    /// # Errors
    /// [`LoadError::LibraryNotFound`], [`LoadError::MissingSymbol`].
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: the system's libcuda, by the name that the driver installs it under.
        let loaded = unsafe { Self::load_from(SONAME) };
        match loaded {
            Err(LoadError::LibraryNotFound { .. }) if Path::new(WSL_PATH).exists() => {
                // SAFETY: as above, where WSL puts it.
                unsafe { Self::load_from(WSL_PATH) }
            }
            loaded => loaded,
        }
    }

    /// Opens the driver library at `path` and fills the table from it. As [`load`](Self::load) otherwise.
    ///
    /// # Safety
    /// Opening a library runs its initialisers, and its entry points are called as libcuda's: the file is a CUDA
    /// driver or a stand-in that keeps the promise of [`RawDriver`].
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let path = path.as_ref();
        let name: OsString = path.into();
        // SAFETY: the caller vouches for the library.
        let opened = unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) };
        let library = match opened {
            Ok(library) => Box::leak(Box::new(library)),
            Err(error) => {
                return Err(LoadError::LibraryNotFound { library: path.to_owned(), source: Box::new(error) });
            }
        };
        let resolver = Resolver::of(library);
        // SAFETY: the addresses are those of a libcuda that is never unloaded, asked for by name and version.
        unsafe { Self::from_source(&mut |symbol| resolver.resolve(library, symbol)) }.map_err(|missing| {
            LoadError::MissingSymbol {
                symbol: missing.symbol.call,
                since: missing.symbol.version,
                library: path.to_owned(),
            }
        })
    }
}

/// How a library is asked for an entry point.
enum Resolver {
    /// cuGetProcAddress of CUDA 12.0 and later.
    Current(GetProcAddress),
    /// cuGetProcAddress of CUDA 11.3 to 11.8.
    V11030(GetProcAddress11030),
    /// An older library: by exported name.
    Exports,
}

impl Resolver {
    fn of(library: &Library) -> Self {
        let current = export(library, c"cuGetProcAddress_v2");
        if !current.is_null() {
            // SAFETY: libcuda exports this name with this signature only.
            return Self::Current(unsafe { std::mem::transmute::<*const c_void, GetProcAddress>(current) });
        }
        let older = export(library, c"cuGetProcAddress");
        if !older.is_null() {
            // SAFETY: as above.
            return Self::V11030(unsafe { std::mem::transmute::<*const c_void, GetProcAddress11030>(older) });
        }
        Self::Exports
    }

    fn resolve(&self, library: &Library, symbol: &Symbol) -> *const c_void {
        let name: *const c_char = symbol.name.as_ptr();
        let mut address = std::ptr::null_mut();
        // An unknown name, and one newer than the version asked for, succeed with a null pointer; a version
        // above the driver's own fails. Both mean that the driver has no such entry point.
        let code = match self {
            Self::Current(resolve) => {
                let mut status = CUdriverProcAddressQueryResult::SUCCESS;
                // SAFETY: the name ends in NUL, and both outputs are ours.
                unsafe { resolve(name, &raw mut address, symbol.version.0, 0, &raw mut status) }
            }
            Self::V11030(resolve) => {
                // SAFETY: as above.
                unsafe { resolve(name, &raw mut address, symbol.version.0, 0) }
            }
            Self::Exports => return export(library, symbol.export),
        };
        if code.is_success() { address } else { std::ptr::null() }
    }
}

/// The address that a library exports under `name`, or null.
fn export(library: &Library, name: &CStr) -> *const c_void {
    // SAFETY: the symbol's value is taken as an address and nothing is read through it here.
    match unsafe { library.get::<*const c_void>(name.to_bytes_with_nul()) } {
        Ok(symbol) => symbol.as_raw_ptr(),
        Err(_) => std::ptr::null(),
    }
}
