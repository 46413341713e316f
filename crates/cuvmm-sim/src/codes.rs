//! The names and texts of result codes, as C strings that live for ever.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use cuvmm_driver::CUresult;

struct Words {
    name: CString,
    text: CString,
}

static WORDS: OnceLock<BTreeMap<u32, Words>> = OnceLock::new();

fn words(code: CUresult) -> Option<&'static Words> {
    let all = WORDS.get_or_init(|| {
        let known = |code| CUresult(code).known_name().map(|name| (code, name));
        let c = |words: &str| CString::new(words).unwrap_or_default();
        (0..1000)
            .filter_map(known)
            .map(|(code, name)| (code, Words { name: c(name), text: c(&text(code, name)) }))
            .collect()
    });
    all.get(&code.0)
}

fn text(code: u32, name: &str) -> String {
    let text = match code {
        0 => "no error",
        1 => "invalid argument",
        2 => "out of memory",
        3 => "initialization error",
        4 => "driver shutting down",
        100 => "no CUDA-capable device is detected",
        101 => "invalid device ordinal",
        200 => "device kernel image is invalid",
        201 => "invalid device context",
        218 => "a PTX JIT compilation failed",
        400 => "invalid resource handle",
        500 => "named symbol not found",
        600 => "device not ready",
        700 => "an illegal memory access was encountered",
        709 => "context is destroyed",
        716 => "misaligned address",
        800 => "operation not permitted",
        801 => "operation not supported",
        900 => "operation not permitted when stream is capturing",
        901 => "operation failed due to a previous error during capture",
        999 => "unknown error",
        _ => return name.trim_start_matches("CUDA_ERROR_").to_lowercase().replace('_', " "),
    };
    text.to_owned()
}

pub(crate) fn name_of(code: CUresult) -> Option<&'static CStr> {
    words(code).map(|words| words.name.as_c_str())
}

pub(crate) fn text_of(code: CUresult) -> Option<&'static CStr> {
    words(code).map(|words| words.text.as_c_str())
}
