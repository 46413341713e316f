//! NUMA nodes, as the system lists them: drivers crash when memory is asked of a node that has none.

use std::path::Path;

use crate::error::Error;

/// Where Linux tells of its nodes and processors.
pub(crate) const SYSTEM: &str = "/sys/devices/system";

/// Refuses a node that the system lists, and that has no memory or no processors. What the system doesn't list is
/// left to the driver, which refuses it cleanly.
pub(crate) fn check(system: &Path, node: i32) -> Result<(), Error> {
    let Ok(node) = u32::try_from(node) else {
        return Err(Error::NumaNode { node, reason: "nodes are numbered from 0" });
    };
    let listed = |file| is_listed(&system.join("node").join(file), node);
    if listed("online") != Some(true) {
        return Ok(());
    }
    let reason = match (listed("has_memory"), listed("has_cpu")) {
        (Some(false), _) => "it has no memory",
        (_, Some(false)) => "it has no processors",
        _ => return Ok(()),
    };
    Err(Error::NumaNode { node: node.cast_signed(), reason })
}

/// The node of the processor that the calling thread runs on; 0 on a host without nodes.
pub(crate) fn current(system: &Path) -> Result<i32, Error> {
    if !system.join("node/online").exists() {
        return Ok(0);
    }
    let found = processor().and_then(|processor| node_of(system, processor));
    found.ok_or(Error::NumaNode { node: -1, reason: "the system does not tell the current one" })
}

/// The processor that the calling thread was last seen on.
fn processor() -> Option<u32> {
    // The name of the program, in parentheses, may have anything in it. The processor is the 37th field behind.
    let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(36)?.parse().ok()
}

/// The node that a processor belongs to.
fn node_of(system: &Path, processor: u32) -> Option<i32> {
    let entries = std::fs::read_dir(system.join(format!("cpu/cpu{processor}"))).ok()?;
    entries.flatten().find_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
}

/// Whether a file of numbers and ranges, as `0-3,8`, has this one; none where there is no such file.
fn is_listed(file: &Path, number: u32) -> Option<bool> {
    let list = std::fs::read_to_string(file).ok()?;
    let has = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&number),
            _ => false,
        }
    };
    Some(list.trim().split(',').any(has))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A system of nodes 0 to 3, of which 1 has no memory and 2 no processors; processor 5 is of node 3.
    fn uneven(name: &str) -> std::path::PathBuf {
        let system = std::env::temp_dir().join(format!("cuvmm-numa-{}-{name}", std::process::id()));
        fs::create_dir_all(system.join("node")).unwrap();
        fs::create_dir_all(system.join("cpu/cpu5/node3")).unwrap();
        for (file, list) in [("online", "0-3\n"), ("has_memory", "0,2-3\n"), ("has_cpu", "0-1,3\n")] {
            fs::write(system.join("node").join(file), list).unwrap();
        }
        system
    }

    #[test]
    fn a_node_without_memory_or_processors_is_refused() {
        let system = uneven("check");
        let check = |node| check(&system, node).map_err(|error| error.to_string());
        assert_eq!((check(0), check(3)), (Ok(()), Ok(())));
        assert_eq!(check(1), Err("NUMA node 1 can't be used: it has no memory".into()));
        assert_eq!(check(2), Err("NUMA node 2 can't be used: it has no processors".into()));
        assert_eq!(check(-1), Err("NUMA node -1 can't be used: nodes are numbered from 0".into()));
        assert_eq!(check(9999), Ok(()), "the driver's to refuse");
        fs::remove_dir_all(system).unwrap();
    }

    #[test]
    fn the_current_node_is_the_one_of_the_processor() {
        let system = uneven("current");
        assert_eq!((node_of(&system, 5), node_of(&system, 6)), (Some(3), None));
        assert!(processor().is_some());
        assert_eq!(current(Path::new("/nowhere")).unwrap(), 0, "a host without nodes");
        let here = current(Path::new(SYSTEM)).unwrap();
        check(Path::new(SYSTEM), here).unwrap();
        fs::remove_dir_all(system).unwrap();
    }
}
