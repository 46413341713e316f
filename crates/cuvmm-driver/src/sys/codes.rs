//! Result codes, with the names that the driver gives them.

macro_rules! codes {
    ($($name:ident = $code:literal,)*) => {
        /// What a call answered. Codes newer than this crate keep their number.
        #[must_use]
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct CUresult(pub u32);

        #[allow(missing_docs, reason = "each is the driver's own CUDA_ERROR_ name")]
        impl CUresult {
            $(pub const $name: Self = Self($code);)*

            /// The name of a code that this crate knows.
            pub fn known_name(self) -> Option<&'static str> {
                match self.0 {
                    0 => Some("CUDA_SUCCESS"),
                    $($code => Some(concat!("CUDA_ERROR_", stringify!($name))),)*
                    _ => None,
                }
            }
        }
    };
}

impl CUresult {
    /// The call did what it says.
    pub const SUCCESS: Self = Self(0);

    /// Whether the call succeeded.
    pub fn is_success(self) -> bool {
        self == Self::SUCCESS
    }
}

codes! {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    DEINITIALIZED = 4,
    STUB_LIBRARY = 34,
    CALL_REQUIRES_NEWER_DRIVER = 36,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    MAP_FAILED = 205,
    UNMAP_FAILED = 206,
    ALREADY_MAPPED = 208,
    NOT_MAPPED = 211,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_PTX = 218,
    OPERATING_SYSTEM = 304,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    LOSSY_QUERY = 402,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    PEER_ACCESS_NOT_ENABLED = 705,
    PRIMARY_CONTEXT_ACTIVE = 708,
    CONTEXT_IS_DESTROYED = 709,
    TOO_MANY_PEERS = 711,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    SYSTEM_NOT_READY = 802,
    SYSTEM_DRIVER_MISMATCH = 803,
    COMPAT_NOT_SUPPORTED_ON_DEVICE = 804,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_MERGE = 902,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_UNJOINED = 904,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
    TIMEOUT = 909,
    EXTERNAL_DEVICE = 911,
    FABRIC_NOT_READY = 919,
    UNKNOWN = 999,
}

impl std::fmt::Debug for CUresult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for CUresult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.known_name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "code {}", self.0),
        }
    }
}
