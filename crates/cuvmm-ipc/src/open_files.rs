//! The limit of open files, as [`Error::OpenFiles`]: handles are files, and a large buffer has many.

use std::io;

use cuvmm_driver::Call;
use cuvmm_driver::sys::CUresult;
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use rustix::fs::{Mode, OFlags, open};

use crate::error::Error;

/// So few handles are not worth a call that asks for the limit beforehand.
const FEW: usize = 32;
/// How many files a driver may open for one handle, at most.
const AT_ONCE: usize = 4;

/// Refuses more handles than the process may have open files, before any of them is made.
pub(crate) fn require(needed: usize) -> Result<(), Error> {
    if needed <= FEW {
        return Ok(());
    }
    let limit = soft_limit();
    if needed as u64 > limit { Err(Error::OpenFiles { limit, needed }) } else { Ok(()) }
}

/// Makes that of a failure to make one of `needed` handles, where it is one. To be called while those that were made
/// are open.
pub(crate) fn explain(error: Error, needed: usize) -> Error {
    let is_it = match &error {
        Error::Os { source, .. } => is_open_files(source),
        // So the driver says it, and perhaps other things.
        _ => {
            let failed = (error.call(), error.code());
            failed == (Some(Call::cuMemExportToShareableHandle), Some(CUresult::OPERATING_SYSTEM)) && is_reached()
        }
    };
    if is_it { Error::OpenFiles { limit: soft_limit(), needed } } else { error }
}

/// Whether the process can't open as many other files now as a driver may open for one handle.
pub(crate) fn is_reached() -> bool {
    let opened = [(); AT_ONCE].map(|()| open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()));
    opened.into_iter().any(|file| file.is_err_and(|errno| is_open_files(&errno.into())))
}

fn is_open_files(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EMFILE as i32)
}

pub(crate) fn soft_limit() -> u64 {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(soft, _)| soft)
}
