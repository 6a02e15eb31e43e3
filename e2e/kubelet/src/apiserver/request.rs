//! Requests: from HTTP to a verb on a resource.

use std::collections::BTreeMap;

use http::Method;

use super::errors::ApiError;
use super::kinds::Kind;

/// A verb of a request, by its name in RBAC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the verbs are named after what they are")]
pub enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
}

impl Verb {
    /// Whether the verb changes objects.
    pub fn is_write(self) -> bool {
        !matches!(self, Self::Get | Self::List | Self::Watch)
    }
}

/// A request on a resource.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) kind: &'static Kind,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
    pub(super) subresource: Option<String>,
    query: BTreeMap<String, String>,
}

impl Request {
    pub(super) fn parse(method: &Method, uri: &http::Uri) -> Result<Self, ApiError> {
        let query = parse_query(uri.query().unwrap_or_default());
        let parts: Vec<String> = uri.path().split('/').filter(|part| !part.is_empty()).map(decoded).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let (group, version, rest) = match &parts[..] {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return Err(ApiError::unknown_path()),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, rest @ ..] if !rest.is_empty() => (Some((*namespace).to_owned()), rest),
            rest => (None, rest),
        };
        let (plural, name, subresource) = match rest {
            [plural] => (plural, None, None),
            [plural, name] => (plural, Some(*name), None),
            [plural, name, subresource] => (plural, Some(*name), Some(*subresource)),
            _ => return Err(ApiError::unknown_path()),
        };
        let kind = Kind::find(group, version, plural).ok_or_else(ApiError::unknown_path)?;
        let known = match subresource {
            None => true,
            Some(subresource) => subresource == "status" && kind.status,
        };
        let placed = match (&namespace, name) {
            (Some(_), _) => kind.namespaced,
            (None, Some(_)) => !kind.namespaced,
            (None, None) => true,
        };
        if !known || !placed {
            return Err(ApiError::unknown_path());
        }
        let watched = query.get("watch").is_some_and(|watch| watch == "true" || watch == "1");
        let verb = match (method.as_str(), name) {
            ("GET", None) if watched => Verb::Watch,
            ("GET", None) => Verb::List,
            ("GET", Some(_)) => Verb::Get,
            ("POST", None) if kind.namespaced == namespace.is_some() => Verb::Create,
            ("PUT", Some(_)) => Verb::Update,
            ("PATCH", Some(_)) => Verb::Patch,
            ("DELETE", Some(_)) => Verb::Delete,
            ("DELETE", None) => Verb::DeleteCollection,
            _ => {
                let message = "the server does not allow this method on the requested resource";
                return Err(ApiError::new(405, "MethodNotAllowed", message));
            }
        };
        let (name, subresource) = (name.map(str::to_owned), subresource.map(str::to_owned));
        Ok(Self { verb, kind, namespace, name, subresource, query })
    }

    pub(super) fn param(&self, key: &str) -> Option<&str> {
        self.query.get(key).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        self.param(key).is_some_and(|value| value == "true" || value == "1")
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<u64>, ApiError> {
        let parse = |text: &str| {
            text.parse().map_err(|_| ApiError::bad_request(format!("{key}: Invalid value: {text:?}")))
        };
        self.param(key).map(parse).transpose()
    }
}

fn parse_query(query: &str) -> BTreeMap<String, String> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(&key.replace('+', " ")), decoded(&value.replace('+', " ")))
    };
    query.split('&').filter(|part| !part.is_empty()).map(pair).collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let digits = (*first == b'%').then(|| after.get(..2)).flatten();
        let byte = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_verbs() {
        let parse = |method: &str, uri: &str| {
            let request = Request::parse(&method.parse().unwrap(), &uri.parse().unwrap())?;
            Ok::<_, ApiError>((request.verb, request.kind.plural, request.name, request.subresource))
        };
        let slices = "/apis/resource.k8s.io/v1/resourceslices";
        let claims = "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims";
        let status = (Verb::Patch, "resourceclaims", Some("b".to_owned()), Some("status".to_owned()));
        assert_eq!(parse("PATCH", &format!("{claims}/b/status?force=true")), Ok(status));
        let wipe = (Verb::DeleteCollection, "resourceslices", None, None);
        assert_eq!(parse("DELETE", &format!("{slices}?fieldSelector=spec.nodeName%3Dn")), Ok(wipe));
        for unknown in ["/apis/resource.k8s.io/v1beta1/resourceslices", "/version/x", "/api/v1/nodes/a/proxy"]
        {
            assert_eq!(parse("GET", unknown).unwrap_err().code, 404, "{unknown}");
        }
        assert_eq!(parse("GET", "/apis/resource.k8s.io/v1/resourceclaims/b").unwrap_err().code, 404);
        assert_eq!(parse("POST", &format!("{slices}/a")).unwrap_err().code, 405);
        let request = Request::parse(
            &Method::GET,
            &format!("{slices}?fieldSelector=a%3Db%2Cc%3d%20d+e").parse().unwrap(),
        );
        assert_eq!(request.unwrap().param("fieldSelector"), Some("a=b,c= d e"));
    }
}
