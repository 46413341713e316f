//! Who and where: [`BufferId`], [`HostId`], [`Location`].

use std::fs::File;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use cuvmm_driver::sys::CUuuid;
use cuvmm_resource::VirtualMemoryResource;

/// Which buffer a descriptor describes, as its exporter named it.
///
/// Two exports of one buffer have equal ids, though their handles differ. Another buffer has another id, also one at
/// the same address, and also one of another process. So an id, and not a handle, an address or a process id, is what
/// a cache of imports looks up.
///
/// ```
/// let id = cuvmm_ipc::BufferId::new([0xab; 16], 3).ok_or("a family of zeros")?;
/// assert_eq!(id.to_string(), "abababababababababababababababab/3");
/// # Ok::<(), &str>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId {
    family: [u8; 16],
    generation: u64,
}

impl BufferId {
    /// The id of those parts; none for a family of zeros, which means "not told".
    pub fn new(family: [u8; 16], generation: u64) -> Option<Self> {
        (family != [0; 16]).then_some(Self { family, generation })
    }

    /// 128 random bits that the buffer shares with those that it was grown from or into, and with no other.
    pub fn family(&self) -> [u8; 16] {
        self.family
    }

    /// Which of its family it is: a grown buffer's is higher.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The id of this process's buffer of those numbers. Random bits are read once a process.
    pub(crate) fn of_this_process(family: u64, generation: u64) -> io::Result<Self> {
        static BITS: ProcessBits = ProcessBits::new();
        // As random as those bits, and different for each number.
        let family = BITS.of(std::process::id())?.wrapping_add(u128::from(family)).to_le_bytes();
        Ok(Self { family, generation })
    }
}

/// Random bits of one process: a child that was forked reads its own. There is no lock that another thread may have
/// had when the process was forked.
struct ProcessBits {
    /// Which process writes the bits, or has written them; no process has number 0.
    claimed_by: AtomicU32,
    /// Whose bits are whole.
    written_by: AtomicU32,
    low: AtomicU64,
    high: AtomicU64,
}

impl ProcessBits {
    const fn new() -> Self {
        let (claimed_by, written_by) = (AtomicU32::new(0), AtomicU32::new(0));
        Self { claimed_by, written_by, low: AtomicU64::new(0), high: AtomicU64::new(0) }
    }

    /// The bits of the process of that number, which calls this.
    fn of(&self, process: u32) -> io::Result<u128> {
        if self.written_by.load(Ordering::Acquire) != process {
            let [low, high] = random_bits()?;
            if self.claimed_by.swap(process, Ordering::AcqRel) != process {
                self.low.store(low, Ordering::Relaxed);
                self.high.store(high, Ordering::Relaxed);
                self.written_by.store(process, Ordering::Release);
            }
            // Another thread of this process is about to have written them.
            while self.written_by.load(Ordering::Acquire) != process {
                std::thread::yield_now();
            }
        }
        Ok(u128::from(self.high.load(Ordering::Relaxed)) << 64 | u128::from(self.low.load(Ordering::Relaxed)))
    }
}

pub(crate) fn random_bits() -> io::Result<[u64; 2]> {
    let mut source = File::open("/dev/urandom")?;
    let (mut low, mut high) = ([0; 8], [0; 8]);
    source.read_exact(&mut low)?;
    source.read_exact(&mut high)?;
    Ok([u64::from_le_bytes(low), u64::from_le_bytes(high)])
}

impl std::fmt::Display for BufferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", Hex(self.family), self.generation)
    }
}

impl std::fmt::Debug for BufferId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BufferId({self})")
    }
}

/// Which host, and which boot of it: handles of another one name nothing here.
///
/// It is the kernel's boot id, which all containers of a host share.
///
/// ```
/// use cuvmm_ipc::HostId;
///
/// assert_eq!(HostId::current(), HostId::current());
/// assert_ne!(HostId::current(), HostId::new([1; 16]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId([u8; 16]);

impl HostId {
    /// The id of those bytes; none for zeros, which mean "not told".
    pub fn new(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then_some(Self(bytes))
    }

    /// This host; none where the kernel doesn't say (`/proc` may be missing in a container).
    pub fn current() -> Option<Self> {
        // No lock that another thread may have had when the process was forked: whoever reads the id reads the same.
        const UNREAD: u8 = 0;
        const UNKNOWN: u8 = 1;
        const KNOWN: u8 = 2;
        static STATE: AtomicU8 = AtomicU8::new(UNREAD);
        static HALVES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
        match STATE.load(Ordering::Acquire) {
            UNREAD => {
                let read = read_boot_id();
                if let Some(id) = read {
                    let bits = u128::from_ne_bytes(id.0);
                    HALVES[0].store((bits >> 64) as u64, Ordering::Relaxed);
                    HALVES[1].store(bits as u64, Ordering::Relaxed);
                }
                STATE.store(if read.is_some() { KNOWN } else { UNKNOWN }, Ordering::Release);
                read
            }
            KNOWN => {
                let [high, low] = HALVES.each_ref().map(|half| u128::from(half.load(Ordering::Relaxed)));
                Some(Self((high << 64 | low).to_ne_bytes()))
            }
            _ => None,
        }
    }

    /// The bytes, in the order in which the text form of a boot id spells them.
    pub fn bytes(&self) -> [u8; 16] {
        self.0
    }

    /// Whether `self` and `other` are known to be different hosts.
    pub(crate) fn differ(ours: Option<Self>, theirs: Option<Self>) -> Option<(Self, Self)> {
        match (ours, theirs) {
            (Some(ours), Some(theirs)) if ours != theirs => Some((ours, theirs)),
            _ => None,
        }
    }
}

fn read_boot_id() -> Option<HostId> {
    parse_boot_id(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?)
}

fn parse_boot_id(text: &str) -> Option<HostId> {
    parse_digits(text.trim()).and_then(HostId::new)
}

/// Reads 32 hexadecimal digits with dashes anywhere between them.
pub(crate) fn parse_digits(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut digits = 0;
    for digit in text.chars().filter(|&c| c != '-') {
        let value = u8::try_from(digit.to_digit(16)?).ok()?;
        let byte = bytes.get_mut(digits / 2)?;
        *byte = *byte << 4 | value;
        digits += 1;
    }
    (digits == 32).then_some(bytes)
}

impl std::fmt::Display for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(&Hex(self.0), f)
    }
}

impl std::fmt::Debug for HostId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostId({self})")
    }
}

/// Where a buffer's memory lives, in words that mean the same in every process of a host.
///
/// ```
/// let location = cuvmm_ipc::Location::HostNuma { node: 1 };
/// assert_eq!(location.to_string(), "NUMA node 1 of the host");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum Location {
    /// On the device that has this UUID, whatever number a process gives it.
    Device {
        /// The device's UUID.
        #[cfg_attr(feature = "serde", serde(with = "crate::serialized::uuid"))]
        uuid: CUuuid,
    },
    /// In the host's memory.
    HostNuma {
        /// The NUMA node.
        node: i32,
    },
}

impl Location {
    /// Where a resource's memory lives. Memory that can be shared is a device's or of a node of its own.
    pub(crate) fn of(resource: &VirtualMemoryResource) -> Result<Self, cuvmm_driver::Error> {
        match resource.location() {
            cuvmm_resource::Location::HostNuma(node) => Ok(Self::HostNuma { node }),
            _ => Ok(Self::Device { uuid: resource.device().uuid()? }),
        }
    }
}

impl std::fmt::Display for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Device { uuid } => write!(f, "device {uuid}"),
            Self::HostNuma { node } => write!(f, "NUMA node {node} of the host"),
        }
    }
}

/// Sixteen bytes as 32 digits.
pub(crate) struct Hex(pub(crate) [u8; 16]);

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_is_read_whole_or_not_at_all() {
        let check = |text: &str, expect: Option<[u8; 16]>| {
            assert_eq!(parse_boot_id(text).map(|id| id.bytes()), expect, "{text:?}");
        };
        let bytes = [0x1d, 0xde, 0x30, 0x6c, 0xa7, 0xef, 0x49, 0x9a, 0xba, 0x0b, 0x18, 0x1c, 0x00, 0xcd, 0x3a, 0xd5];
        check("1dde306c-a7ef-499a-ba0b-181c00cd3ad5\n", Some(bytes));
        check("1DDE306CA7EF499ABA0B181C00CD3AD5", Some(bytes));
        check("1dde306c-a7ef-499a-ba0b-181c00cd3ad", None);
        check("1dde306c-a7ef-499a-ba0b-181c00cd3ad55", None);
        check("1dde306c-a7ef-499a-ba0b-181c00cd3adg", None);
        check("00000000-0000-0000-0000-000000000000", None);
        check("", None);
    }

    #[test]
    fn ids_tell_families_and_generations_apart() {
        let id = |family, generation| BufferId::of_this_process(family, generation).unwrap();
        assert_eq!(id(1, 1), id(1, 1));
        assert_ne!(id(1, 1), id(1, 2));
        assert_eq!(id(1, 1).family(), id(1, 2).family());
        assert_ne!(id(1, 1).family(), id(2, 1).family());
        // The numbers themselves say nothing.
        assert!(id(1, 1).family().iter().filter(|byte| **byte == 0).count() < 8);
    }

    #[test]
    fn a_forked_child_has_bits_of_its_own_and_all_threads_the_same() {
        let bits = ProcessBits::new();
        let parents = bits.of(7).unwrap();
        assert_eq!(bits.of(7).unwrap(), parents);
        // The child has a copy of what its parent knew.
        let childs = bits.of(8).unwrap();
        assert_ne!(childs, parents);
        assert_eq!(bits.of(8).unwrap(), childs);
        let bits = ProcessBits::new();
        let all = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| bits.of(9).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(all.iter().all(|bits| *bits == all[0]), "{all:x?}");
    }

    #[test]
    fn only_two_known_hosts_differ() {
        let (a, b) = (HostId::new([1; 16]), HostId::new([2; 16]));
        assert_eq!(HostId::differ(a, a), None);
        assert_eq!(HostId::differ(a, None), None);
        assert_eq!(HostId::differ(None, b), None);
        assert_eq!(HostId::differ(a, b), a.zip(b));
    }

    #[test]
    fn ids_read_as_digits() {
        let id = BufferId::new([0xab; 16], 7).unwrap();
        assert_eq!(id.to_string(), format!("{}/7", "ab".repeat(16)));
        assert_eq!(HostId::new([0x0f; 16]).unwrap().to_string(), "0f".repeat(16));
        assert_eq!(BufferId::new([0; 16], 7), None);
        assert_eq!(HostId::new([0; 16]), None);
    }
}
