//! Who is at the other end: [`PeerIdentity`], [`AllowedPeers`].

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::fs::Mode;
use rustix::process::{getegid, geteuid};

use crate::error::Error;
use crate::handles::close_unread;

/// Which process is at the other end of a Unix socket, as the kernel tells (`SO_PEERCRED`).
///
/// It is the one that connected, as it was then; for who connected, the one that listens, as it was when it began to;
/// for a socket pair, the one that made it. A process may have handed its end on, or changed its user, since.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
/// let peer = cuvmm_ipc::PeerIdentity::of(&ours)?;
/// assert_eq!(peer.pid, std::process::id());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PeerIdentity {
    /// The number of the process. Numbers are used again, so it names no process for sure once that has ended. 0 for
    /// one that this process can't see, in a container that isn't inside its own.
    pub pid: u32,
    /// Its effective user, as this process's user namespace has it. All that are none there are one, 65534 as a rule
    /// (`/proc/sys/kernel/overflowuid`): to allow that number is to allow all of them.
    pub uid: u32,
    /// Its effective group; which others it is a member of is not told.
    pub gid: u32,
}

impl PeerIdentity {
    /// Asks who is at the other end of a connected Unix socket. Of any other socket the kernel says process 0 and
    /// `u32::MAX`, which is no user.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn of<S: AsFd>(socket: S) -> Result<Self, Error> {
        let told = getsockopt(&socket, PeerCredentials).map_err(Error::os("ask who is at the other end"))?;
        Ok(Self { pid: u32::try_from(told.pid()).unwrap_or(0), uid: told.uid(), gid: told.gid() })
    }
}

/// Which processes may be at the other end of a named socket.
///
/// By default, those of this process's own effective user. Once any user or group is named, a process must be of one of
/// those, and the own user is no more than another: name it, too, where it is meant ([`own_user`](Self::own_user)). Numbers of processes narrow that
/// down, and never let anybody in by themselves: numbers are used again.
///
/// ```
/// use cuvmm_ipc::AllowedPeers;
///
/// // Users 1000 and 1001, and whoever is of group 44.
/// let allowed = AllowedPeers::default().uid(1000).uid(1001).gid(44);
/// // The own user, and of its processes only the one that is named.
/// let one = AllowedPeers::default().pid(4711);
/// # assert_ne!(allowed, one);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedPeers {
    is_anyone: bool,
    uids: Vec<u32>,
    gids: Vec<u32>,
    pids: Vec<u32>,
}

impl AllowedPeers {
    /// Allows a user.
    #[must_use]
    pub fn uid(mut self, uid: u32) -> Self {
        self.uids.push(uid);
        self
    }

    /// Allows the own effective user, beside the others that are named.
    ///
    /// ```
    /// # use cuvmm_ipc::{AllowedPeers, PeerIdentity};
    /// # let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|_| "no pair")?;
    /// # let own = PeerIdentity::of(&ours).map_err(|_| "nobody")?;
    /// assert!(!AllowedPeers::default().uid(own.uid + 1).allows(own));
    /// assert!(AllowedPeers::default().uid(own.uid + 1).own_user().allows(own));
    /// # Ok::<(), &str>(())
    /// ```
    #[must_use]
    pub fn own_user(self) -> Self {
        self.uid(geteuid().as_raw())
    }

    /// Allows those whose effective group it is when they connect.
    #[must_use]
    pub fn gid(mut self, gid: u32) -> Self {
        self.gids.push(gid);
        self
    }

    /// Allows only this process, and others that are named so, of those that are allowed otherwise.
    #[must_use]
    pub fn pid(mut self, pid: u32) -> Self {
        self.pids.push(pid);
        self
    }

    /// Allows every user. Whoever connects may be sent memory to read and to write.
    #[must_use]
    pub fn anyone(mut self) -> Self {
        self.is_anyone = true;
        self
    }

    /// Whether such a process is allowed.
    ///
    /// ```
    /// # use cuvmm_ipc::{AllowedPeers, PeerIdentity};
    /// # let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|_| "no pair")?;
    /// let peer = PeerIdentity::of(&ours).map_err(|_| "nobody")?;
    /// assert!(AllowedPeers::default().allows(peer));
    /// assert!(!AllowedPeers::default().uid(peer.uid + 1).allows(peer));
    /// # Ok::<(), &str>(())
    /// ```
    pub fn allows(&self, peer: PeerIdentity) -> bool {
        let is_default = !self.is_anyone && self.uids.is_empty() && self.gids.is_empty();
        let is_one_of_them = self.is_anyone
            || self.uids.contains(&peer.uid)
            || self.gids.contains(&peer.gid)
            || (is_default && peer.uid == geteuid().as_raw());
        is_one_of_them && (self.pids.is_empty() || self.pids.contains(&peer.pid))
    }

    /// Asks who is at the other end. The connection of one that is not allowed is closed, and whatever came over it does
    /// not hold this up.
    ///
    /// # Errors
    /// [`Error::PeerDenied`], [`Error::Os`].
    pub(super) fn admit(&self, socket: OwnedFd) -> Result<(OwnedFd, PeerIdentity), Error> {
        match PeerIdentity::of(&socket).and_then(|peer| self.check(peer).map(|()| peer)) {
            Ok(peer) => Ok((socket, peer)),
            Err(error) => {
                close_unread(socket);
                Err(error)
            }
        }
    }

    /// # Errors
    /// [`Error::PeerDenied`].
    fn check(&self, peer: PeerIdentity) -> Result<(), Error> {
        let PeerIdentity { pid, uid, gid } = peer;
        if self.allows(peer) { Ok(()) } else { Err(Error::PeerDenied { pid, uid, gid }) }
    }

    /// The mode of a socket's file that lets all of them connect, and as few others as a mode can tell apart: to connect
    /// is to write.
    pub(super) fn mode(&self) -> Mode {
        let (own_user, own_group) = (geteuid().as_raw(), getegid().as_raw());
        let is_other_user = self.uids.iter().any(|&uid| uid != own_user);
        let is_other_group = self.gids.iter().any(|&gid| gid != own_group);
        if self.is_anyone || is_other_user || is_other_group {
            Mode::from_raw_mode(0o666)
        } else if !self.gids.is_empty() {
            Mode::from_raw_mode(0o660)
        } else {
            Mode::from_raw_mode(0o600)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: PeerIdentity = PeerIdentity { pid: 10, uid: 20, gid: 30 };

    #[test]
    fn users_and_groups_add_and_processes_narrow() {
        let check = |allowed: AllowedPeers, expect: bool| {
            assert_eq!(allowed.allows(PEER), expect, "{allowed:?}");
            match (allowed.check(PEER), expect) {
                (Ok(()), true) | (Err(Error::PeerDenied { pid: 10, uid: 20, gid: 30 }), false) => {}
                (checked, _) => panic!("{allowed:?}: {checked:?}"),
            }
        };
        let allowed = AllowedPeers::default;
        check(allowed(), geteuid().as_raw() == PEER.uid);
        check(allowed().uid(20), true);
        check(allowed().uid(21), false);
        check(allowed().uid(21).uid(20), true);
        check(allowed().gid(30), true);
        check(allowed().gid(20), false);
        check(allowed().uid(21).gid(30), true);
        check(allowed().anyone(), true);
        check(allowed().pid(10), geteuid().as_raw() == PEER.uid);
        check(allowed().uid(20).pid(10), true);
        check(allowed().uid(20).pid(11), false);
        check(allowed().uid(20).pid(11).pid(10), true);
        check(allowed().uid(21).pid(10), false);
        check(allowed().anyone().pid(10), true);
        check(allowed().anyone().pid(11), false);
    }

    #[test]
    fn the_default_is_the_own_user_and_no_more_than_a_default() {
        let (uid, gid) = (geteuid().as_raw(), 30);
        let own = PeerIdentity { pid: 10, uid, gid };
        assert!(AllowedPeers::default().allows(own));
        assert!(AllowedPeers::default().pid(10).allows(own));
        assert!(!AllowedPeers::default().pid(11).allows(own));
        assert!(!AllowedPeers::default().uid(uid + 1).allows(own));
        assert!(AllowedPeers::default().uid(uid + 1).own_user().allows(own));
        assert!(AllowedPeers::default().own_user().allows(own));
        assert!(!AllowedPeers::default().own_user().pid(11).allows(own));
        assert!(!AllowedPeers::default().own_user().allows(PeerIdentity { uid: uid + 1, ..own }));
        assert!(!AllowedPeers::default().gid(gid + 1).allows(own));
        assert!(!AllowedPeers::default().allows(PeerIdentity { uid: uid + 1, ..own }));
    }

    #[test]
    fn a_mode_lets_in_no_more_than_it_must() {
        let (uid, gid) = (geteuid().as_raw(), getegid().as_raw());
        let check = |allowed: AllowedPeers, expect: u32| {
            assert_eq!(allowed.mode().as_raw_mode(), expect, "{allowed:?}");
        };
        let allowed = AllowedPeers::default;
        check(allowed(), 0o600);
        check(allowed().pid(1), 0o600);
        check(allowed().uid(uid), 0o600);
        check(allowed().gid(gid), 0o660);
        check(allowed().uid(uid).gid(gid), 0o660);
        check(allowed().uid(uid + 1), 0o666);
        check(allowed().gid(gid + 1), 0o666);
        check(allowed().anyone(), 0o666);
    }
}
