"""Token trees and their verification, in plain torch: no SGLang in here."""
