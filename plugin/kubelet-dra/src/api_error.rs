//! Texts of errors of the API server.

/// The HTTP status, if the API server has answered.
pub(crate) fn code_of(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}

/// The API server's own words, or the whole chain of causes.
pub(crate) fn text_of(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return format!("{} ({})", status.message, status.code);
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}
