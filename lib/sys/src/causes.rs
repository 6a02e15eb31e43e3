//! Errors with their causes.

use std::error::Error;

/// Returns an error with its causes, in one line.
#[must_use]
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    for cause in std::iter::successors(error.source(), |&cause| cause.source()) {
        text = format!("{text}: {cause}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct ErrorWithCause(&'static str, Option<Box<Self>>);

    impl std::fmt::Display for ErrorWithCause {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for ErrorWithCause {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn error_is_followed_by_all_its_causes() {
        let error =
            ["c", "b", "a"].into_iter().fold(None, |cause, text| Some(Box::new(ErrorWithCause(text, cause))));
        assert_eq!(with_causes(&*error.unwrap()), "a: b: c");
    }
}
