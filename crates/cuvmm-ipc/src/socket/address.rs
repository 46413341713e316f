//! Paths as names of sockets, and the sockets.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::error::Error;

/// The most bytes of a path: one of the 108 that the kernel has ends it.
const LIMIT: usize = 107;

/// The name that a socket has by that path.
pub(super) fn of(path: &Path) -> Result<SocketAddrUnix, Error> {
    let length = path.as_os_str().as_bytes().len();
    if length > LIMIT {
        return Err(Error::PathTooLong { length, limit: LIMIT });
    }
    let operation = "name a socket";
    if length == 0 {
        // To the kernel it is a wish for a name of its own choice.
        return Err(Error::os_at(operation, path)(Errno::INVAL));
    }
    SocketAddrUnix::new(path).map_err(Error::os_at(operation, path))
}

/// A stream socket without a name yet.
pub(super) fn socket(flags: SocketFlags) -> Result<OwnedFd, Error> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(Error::os("make a socket"))
}

/// Whether nobody listens there any more. What can't be told is taken for somebody.
pub(super) fn is_stale(address: &SocketAddrUnix) -> Result<bool, Error> {
    let probe = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    Ok(connect(probe, address) == Err(Errno::CONNREFUSED))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_a_name_up_to_the_limit() {
        let check = |length: usize, expect: Option<Error>| {
            let path = format!("/{}", "a".repeat(length - 1));
            let found = of(Path::new(&path)).map(|_| ()).err().map(|error| error.to_string());
            assert_eq!(found, expect.map(|error| error.to_string()), "{length}");
        };
        check(1, None);
        check(107, None);
        check(108, Some(Error::PathTooLong { length: 108, limit: 107 }));
        check(5000, Some(Error::PathTooLong { length: 5000, limit: 107 }));
    }

    #[test]
    fn no_name_and_one_with_a_zero_in_it_are_refused() {
        for path in ["", "\0abstract", "/tmp/a\0b"] {
            let Err(Error::Os { path: Some(told), source, .. }) = of(Path::new(path)) else { panic!("{path:?}") };
            assert_eq!(source.raw_os_error(), Some(Errno::INVAL.raw_os_error()), "{path:?}");
            assert_eq!(told, Path::new(path));
        }
    }
}
