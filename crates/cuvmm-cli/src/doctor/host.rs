//! What the host gives this process: read from files, by paths that a test may put elsewhere.

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Value, json};

use super::driver::loaded_library;
use super::report::{Row, Section, bytes};

/// Fewer open files than this are soon used up by exported chunks.
const FEW_FILES: u64 = 4096;
/// The bit of CAP_SYS_NICE.
const SYS_NICE: u32 = 23;
/// What `environment` looks at.
const VARIABLES: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH"];

/// What was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Host {
    /// Where the driver's library is, once it is loaded.
    pub(super) library: Option<String>,
    /// The version of the kernel driver.
    pub(super) kernel_driver: Option<String>,
    /// The NUMA nodes with processors; 0 where that is not told. On some hosts a GPU's memory is a node without.
    pub(super) nodes: Vec<i32>,
    limits: String,
    status: String,
    ptrace_scope: Option<u32>,
    container: Option<&'static str>,
    wsl: bool,
    /// The nodes that the driver talks through, and whether each can be opened; none on WSL, where it is another.
    device_nodes: Vec<(String, Result<(), String>)>,
    imex: Imex,
}

/// What there is of IMEX.
#[derive(Clone, Debug, Default)]
struct Imex {
    in_kernel: bool,
    channels: Vec<(String, Result<(), String>)>,
}

impl Host {
    /// Reads what is below `root`.
    pub(super) fn read(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let exists = |path: &str| root.join(path).exists();
        let container = [
            ("/.dockerenv", "Docker"),
            ("/run/.containerenv", "Podman"),
            ("/.singularity.d", "Apptainer"),
            ("/run/secrets/kubernetes.io", "Kubernetes"),
        ];
        let kernel_driver = text("proc/driver/nvidia/version");
        Self {
            library: loaded_library(root),
            kernel_driver: kernel_driver.lines().next().and_then(version_in).map(str::to_owned),
            nodes: nodes(text("sys/devices/system/node/has_cpu").trim()),
            limits: text("proc/self/limits"),
            status: text("proc/self/status"),
            ptrace_scope: text("proc/sys/kernel/yama/ptrace_scope").trim().parse().ok(),
            container: container.into_iter().find(|(path, _)| exists(&path[1..])).map(|(_, name)| name),
            wsl: exists("dev/dxg"),
            device_nodes: if exists("dev/dxg") { Vec::new() } else { device_nodes(root) },
            imex: Imex {
                in_kernel: text("proc/devices").contains("nvidia-caps-imex-channels"),
                channels: listed(&root.join("dev/nvidia-caps-imex-channels"), "channel"),
            },
        }
    }

    pub(super) fn kernel_driver_row(&self) -> Option<Row> {
        if self.wsl && self.kernel_driver.is_none() {
            return Some(Row::fact("kernel_driver", "kernel driver", "that of Windows: this is WSL"));
        }
        Some(match &self.kernel_driver {
            Some(version) => Row::fact("kernel_driver", "kernel driver", version.clone()).value(version.clone()),
            None => Row::warning(
                "kernel_driver",
                "kernel driver",
                "/proc/driver/nvidia/version is not there: NVIDIA's kernel module is not loaded",
                "load it as root with `modprobe nvidia`; a virtual machine must be given a GPU first",
            ),
        })
    }

    /// What bounds this process, and the nodes that a GPU needs where one is examined.
    pub(super) fn section(&self, with_gpu: bool) -> Section {
        let mut rows = vec![self.open_files(), self.address_space(), self.ptrace(), self.seccomp()];
        rows.push(
            Row::fact("container", "container", self.container.unwrap_or("none that is known")).value(self.container),
        );
        if with_gpu {
            rows.extend(self.device_nodes.iter().map(|(path, opened)| {
                let id = format!("node_{}", path.trim_start_matches("/dev/").replace('-', "_"));
                node_row(&id, path, opened)
            }));
            rows.push(self.imex_row());
            rows.push(environment());
        }
        Section { id: "host".into(), title: "this process on this host".into(), rows }
    }

    fn open_files(&self) -> Row {
        let Some((soft, hard)) = limit(&self.limits, "Max open files") else {
            return Row::fact("open_files", "open files", "the limit is not told by /proc/self/limits");
        };
        let told = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
        let detail = format!("{}, and {} at most; each exported chunk takes one", told(soft), told(hard));
        let row = if soft.is_some_and(|soft| soft < FEW_FILES) {
            Row::warning(
                "open_files",
                "open files",
                detail,
                if soft == hard {
                    "more must be allowed first: LimitNOFILE of a systemd unit, /etc/security/limits.conf, or in Docker `--ulimit nofile`".to_owned()
                } else {
                    format!("`ulimit -n {}` before the program starts", told(hard))
                },
            )
        } else {
            Row::fact("open_files", "open files", detail)
        };
        row.value(json!({ "soft": soft, "hard": hard }))
    }

    fn address_space(&self) -> Row {
        match limit(&self.limits, "Max address space") {
            Some((None, _)) => Row::fact("address_space", "address space", "unlimited"),
            Some((Some(most), _)) => Row::warning(
                "address_space",
                "address space",
                format!("{} at most; reservations count, though they take no memory", bytes(most)),
                "`ulimit -v unlimited`, or fewer and shorter reservations",
            )
            .value(most),
            None => Row::fact("address_space", "address space", "the limit is not told by /proc/self/limits"),
        }
    }

    fn ptrace(&self) -> Row {
        let detail = match self.ptrace_scope {
            None => "no Yama: any process of this user",
            Some(0) => "0: any process of this user",
            Some(1) => "1: children only; pidfd_getfd between others is refused",
            Some(2) => "2: administrators only; pidfd_getfd is refused",
            Some(_) => "nobody; pidfd_getfd is refused",
        };
        let detail = format!("{detail}; descriptors sent over Unix sockets need no right");
        Row::fact("ptrace_scope", "ptrace scope", detail).value(self.ptrace_scope)
    }

    fn seccomp(&self) -> Row {
        let field = |name: &str| {
            let line = self.status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(str::trim)
        };
        let Some(mode) = field("Seccomp") else {
            return Row::fact("seccomp", "seccomp", "not told by /proc/self/status");
        };
        let filtered = mode != "0";
        let capabilities = field("CapEff").and_then(|bits| u64::from_str_radix(bits, 16).ok()).unwrap_or(0);
        let nice = capabilities >> SYS_NICE & 1 == 1;
        let value = json!({ "seccomp": filtered, "sys_nice": nice });
        let row = match (filtered, nice) {
            (false, _) => Row::fact("seccomp", "seccomp", "no filter"),
            (true, true) => Row::fact("seccomp", "seccomp", "a filter, and CAP_SYS_NICE"),
            (true, false) => Row::warning(
                "seccomp",
                "seccomp",
                "a filter, and no CAP_SYS_NICE: it may refuse mbind, which host memory of a NUMA node needs",
                "in Docker `--cap-add SYS_NICE`",
            ),
        };
        row.value(value)
    }

    fn imex_row(&self) -> Row {
        let open = self.imex.channels.iter().filter(|(_, opened)| opened.is_ok()).count();
        let detail = match (self.imex.in_kernel, self.imex.channels.len(), open) {
            (false, 0, _) => "none: the kernel driver has no IMEX channels".to_owned(),
            (true, 0, _) => "none made: fabric handles are refused".to_owned(),
            (_, all, open) => format!("{open} of {all} can be opened"),
        };
        Row::fact("imex_channels", "IMEX channels", detail).value(open)
    }
}

/// A device node: one that is missing or can't be opened is a warning.
fn node_row(id: &str, path: &str, opened: &Result<(), String>) -> Row {
    match opened {
        Ok(()) => Row::fact(id, path, "can be opened").value(true),
        Err(why) => Row::warning(
            id,
            path,
            why.clone(),
            "`nvidia-modprobe -u -c 0` as root makes it; a container must be given it (`--gpus all`), and its cgroup must allow it",
        )
        .value(false),
    }
}

/// The variables that change what a process sees.
fn environment() -> Row {
    let set: Vec<(&str, String)> = VARIABLES
        .iter()
        .filter_map(|name| Some((*name, std::env::var_os(name)?.to_string_lossy().into_owned())))
        .collect();
    let detail = if set.is_empty() {
        format!("none of {}", VARIABLES.join(", "))
    } else {
        set.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
    };
    let value: serde_json::Map<String, Value> =
        set.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
    Row::fact("environment", "environment", detail).value(value)
}

/// The nodes that every process with a GPU opens, and those of the GPUs.
fn device_nodes(root: &Path) -> Vec<(String, Result<(), String>)> {
    let mut nodes: Vec<_> = ["nvidiactl", "nvidia-uvm"]
        .iter()
        .map(|name| (format!("/dev/{name}"), openable(&root.join("dev").join(name))))
        .collect();
    let gpus = listed(&root.join("dev"), "nvidia");
    nodes.extend(gpus.into_iter().map(|(name, opened)| (format!("/dev/{name}"), opened)));
    nodes
}

/// The entries of a folder that are called `prefix` and a number, by number.
fn listed(folder: &Path, prefix: &str) -> Vec<(String, Result<(), String>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let numbered = |name: &str| name.strip_prefix(prefix)?.parse::<u32>().ok();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((numbered(&name)?, name, openable(&entry.path())))
        })
        .collect();
    found.sort_by_key(|(number, ..)| *number);
    found.into_iter().map(|(_, name, opened)| (name, opened)).collect()
}

fn openable(path: &Path) -> Result<(), String> {
    File::options().read(true).write(true).open(path).map(drop).map_err(|error| error.to_string())
}

/// The soft and the hard limit of that name in /proc/self/limits; each none where there is none.
fn limit(limits: &str, name: &str) -> Option<(Option<u64>, Option<u64>)> {
    let mut words = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut next = || match words.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some((next()?, next()?))
}

/// The first word that is numbers between dots, as in `NVRM version: ... Kernel Module  580.159.04  Release Build`.
fn version_in(line: &str) -> Option<&str> {
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|letter| letter.is_ascii_digit() || letter == '.');
    line.split_whitespace().find(is_version)
}

/// The numbers of a list such as `0-1,4`; 0 where there is none.
fn nodes(list: &str) -> Vec<i32> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<i32>().ok()?..=last.parse().ok()?)
    };
    let nodes: Vec<i32> = list.split(',').filter_map(range).flatten().collect();
    if nodes.is_empty() { vec![0] } else { nodes }
}

#[cfg(test)]
mod tests {
    use super::super::report::Answer;
    use super::*;

    #[test]
    fn lists_of_nodes() {
        for (list, expect) in [("0", vec![0]), ("0-1,4", vec![0, 1, 4]), ("", vec![0]), ("x", vec![0])] {
            assert_eq!(nodes(list), expect, "{list:?}");
        }
    }

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
            Max open files            1024                 524288               files     \n\
            Max address space         unlimited            unlimited            bytes     \n";
        assert_eq!(limit(limits, "Max open files"), Some((Some(1024), Some(524_288))));
        assert_eq!(limit(limits, "Max address space"), Some((None, None)));
        assert_eq!(limit(limits, "Max locked memory"), None);
    }

    #[test]
    fn versions_of_both_kernel_modules_are_found() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)";
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023";
        assert_eq!((version_in(open), version_in(closed)), (Some("580.159.04"), Some("535.104.05")));
        assert_eq!(version_in("no version"), None);
    }

    /// A file that cannot be read is no fact of the host.
    #[test]
    fn what_is_not_told_is_not_made_up() {
        let rows = Host::default().section(false).rows;
        for id in ["open_files", "address_space", "seccomp"] {
            let row = rows.iter().find(|row| row.id == id).unwrap();
            assert!(row.detail.contains("not told") && row.value.is_null(), "{row:?}");
        }
    }

    #[test]
    fn the_cure_for_few_open_files_is_one_that_can_be_had() {
        let cure = |limits: &str| Host { limits: limits.to_owned(), ..Host::default() }.open_files().cure;
        assert!(cure("Max open files 1024 4096 files\n").unwrap().contains("`ulimit -n 4096`"));
        assert!(cure("Max open files 1024 1024 files\n").unwrap().contains("LimitNOFILE"));
        assert_eq!(cure("Max open files 4096 4096 files\n"), None);
    }

    /// What this test runs on is told without a warning where nothing is in the way, and with one where it is.
    #[test]
    fn a_host_is_told_as_its_files_have_it() {
        let root = std::env::temp_dir().join(format!("cuvmm-doctor-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/self/limits", "Max open files 1024 4096 files\nMax address space 1048576 unlimited bytes\n");
        write("proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t2\nSeccomp_filters:\t1\n");
        write("proc/self/maps", "7f00-7f01 r-xp 00000000 08:01 7 /usr/lib/libcuda.so.580.159.04\n");
        write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2  Mon\n");
        write("proc/sys/kernel/yama/ptrace_scope", "1\n");
        write("proc/devices", "234 nvidia-caps-imex-channels\n");
        write("dev/nvidiactl", "");
        write("dev/nvidia10", "");
        write("dev/nvidia2", "");
        write("dev/nvidia-caps-imex-channels/channel0", "");
        write(".dockerenv", "");
        let host = Host::read(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(host.library.as_deref(), Some("/usr/lib/libcuda.so.580.159.04"));
        assert_eq!(host.kernel_driver.as_deref(), Some("570.1.2"));
        let rows = host.section(true).rows;
        let row = |id: &str| rows.iter().find(|row| row.id == id).unwrap();
        for id in ["open_files", "address_space", "seccomp", "node_nvidia_uvm"] {
            assert_eq!(row(id).answer, Answer::Warning, "{id}");
        }
        assert_eq!(row("open_files").value, json!({ "soft": 1024, "hard": 4096 }));
        assert_eq!((&row("ptrace_scope").value, &row("container").value), (&json!(1), &json!("Docker")));
        assert_eq!(row("imex_channels").value, json!(1));
        let nodes: Vec<&str> =
            rows.iter().map(|row| row.title.as_str()).filter(|title| title.starts_with("/dev")).collect();
        assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia2", "/dev/nvidia10"]);
    }

    #[test]
    fn on_wsl_no_node_of_nvidias_is_missed() {
        let root = std::env::temp_dir().join(format!("cuvmm-doctor-wsl-{}", std::process::id()));
        fs::create_dir_all(root.join("dev")).unwrap();
        fs::write(root.join("dev/dxg"), "").unwrap();
        let host = Host::read(&root);
        fs::remove_dir_all(&root).unwrap();
        assert!(host.section(true).rows.iter().all(|row| !row.id.starts_with("node_")));
        assert_eq!(host.kernel_driver_row().unwrap().answer, Answer::Fact);
    }
}
